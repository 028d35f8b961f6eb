"""The published sizes of some language models, as fields of `mmnnx.modules.LMConfig`.

Each is computed in bfloat16, as it was published; weights are kept in float32, as training needs them:
`LMConfig.preset(name, param_dtype=jnp.bfloat16)` for inference.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mmnnx.modules.rotary import RotaryScaling

LLAMA3: dict[str, Any] = dict(vocab=128_256, rotary_base=500_000.0, norm_eps=1e-5, dtype=jnp.bfloat16)
QWEN: dict[str, Any] = dict(rotary_base=1_000_000.0, norm_eps=1e-6, dtype=jnp.bfloat16)

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2407.21783
    "llama3-8b": LLAMA3 | dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14_336),
    "llama3-70b": LLAMA3 | dict(layers=80, width=8192, heads=64, kv_heads=8, mlp=28_672),
    "llama3-405b": LLAMA3 | dict(layers=126, width=16_384, heads=128, kv_heads=8, mlp=53_248),
    "llama3.2-1b": LLAMA3
    | dict(layers=16, width=2048, heads=32, kv_heads=8, mlp=8192, tied=True)
    | dict(rotary_scaling=RotaryScaling(factor=32.0)),
    # arXiv:2412.15115
    "qwen2.5-7b": QWEN
    | dict(vocab=152_064, layers=28, width=3584, heads=28, kv_heads=4, mlp=18_944, bias=True),
    # arXiv:2505.09388
    "qwen3-8b": QWEN
    | dict(vocab=151_936, layers=36, width=4096, heads=32, kv_heads=8, mlp=12_288, head_dim=128)
    | dict(qk_norm=True),
    "tiny": dict(vocab=256, layers=4, width=64, heads=4, kv_heads=2, mlp=192),
}

# The same with mixtures of experts, as fields of `mmnnx.modules.MoELMConfig`; `mlp` is the size of an expert.
MOE_PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2401.04088
    "mixtral-8x7b": dict(vocab=32_000, layers=32, width=4096, heads=32, kv_heads=8, mlp=14_336)
    | dict(experts=8, top_k=2, rotary_base=1_000_000.0, norm_eps=1e-5, dtype=jnp.bfloat16),
    # The sizes of arXiv:2412.19437 but for its attention, which is compressed there, and its dense layers.
    "deepseek-v3-like": dict(vocab=129_280, layers=61, width=7168, heads=128, kv_heads=8, head_dim=128)
    | dict(mlp=2048, experts=256, top_k=8, capacity_factor=1.25, dtype=jnp.bfloat16),
    # 62 billion weights in narrow layers.
    "moe-62b": dict(vocab=128_256, layers=26, width=2560, heads=20, kv_heads=4, mlp=4800)
    | dict(experts=64, top_k=4, capacity_factor=1.25, rotary_base=500_000.0, dtype=jnp.bfloat16),
    "tiny-moe": dict(vocab=256, layers=4, width=64, heads=4, kv_heads=2, mlp=96, experts=4),
}
