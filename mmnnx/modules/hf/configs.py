"""`config.json` of a published model as a config of `mmnnx.modules`, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mmnnx.json_object import read_json_object
from mmnnx.modules.gemma import GemmaConfig
from mmnnx.modules.gpt2 import GPT2Config
from mmnnx.modules.hf.weights import DTYPES, Weights
from mmnnx.modules.lm import LMConfig
from mmnnx.modules.moe_lm import MoELMConfig
from mmnnx.modules.rotary import LinearScaling, RotaryScaling, Scaling, YarnScaling

CONFIG = "config.json"


def read_config(folder: str | Path, **changes: Any) -> LMConfig:
    """The config of the model in a folder.

    Args:
      folder: with a `config.json`.
      **changes: fields to set otherwise: `scan=True`, `remat=True`, `param_dtype=jnp.float32`, ...

    Returns:
      An `LMConfig`, or that of `MoELM`, `Gemma` or `GPT2`. Weights are kept in the dtype that `config.json`
      names, else in that of the first of them in the files, and computed in it.

    Raises:
      FileNotFoundError: without a `config.json`.
      ValueError: for an architecture that is not known, or a field that asks for what the modules do not
        have; names it.

    Example:
      >>> save(mm.modules.LM(mm.modules.LMConfig(layers=1), rngs=nnx.Rngs(0)), "tiny")
      >>> read_config("tiny", scan=True).width
      128
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        raise FileNotFoundError(f"there is no {CONFIG} in {folder}: it is no folder of a published model")
    found = _Json(read_json_object(file), file)
    kind = found.need("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise ValueError(
            f"{file}: model_type {kind!r} is not known; there are {', '.join(map(repr, READERS))}"
        )
    config = READERS[kind](found)
    return dataclasses.replace(config, **changes)


def write_config(config: LMConfig) -> dict[str, Any]:
    """What `config.json` says of a model: the inverse of `read_config`, as `transformers` reads it.

    Raises:
      ValueError: for a config that no published architecture has.

    Example:
      >>> write_config(LMConfig(layers=2))["model_type"]
      'llama'
    """
    kind = model_type(config)
    shared = dict(
        architectures=[ARCHITECTURES[kind]],
        model_type=kind,
        dtype=jnp.dtype(config.param_dtype).name,
        vocab_size=config.vocab,
        tie_word_embeddings=config.tied,
        # A config knows of no such tokens; without these fields, `transformers` would stop at token 2, say.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    if isinstance(config, GPT2Config):
        own: dict[str, Any] = dict(n_embd=config.width, n_layer=config.layers, n_head=config.heads)
        own |= dict(n_inner=config.mlp, n_positions=config.positions, layer_norm_epsilon=config.norm_eps)
        return shared | own | dict(activation_function="gelu_new")
    shared |= dict(
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim or config.width // config.heads,
        intermediate_size=config.mlp,
        rms_norm_eps=config.norm_eps,
    )
    windows = config.windows
    window = next((w for w in windows if w is not None), None)
    rope: dict[str, Any] = _write_rope(config.rotary_base, config.rotary_scaling)
    if kind in ("llama", "mistral", "mixtral"):
        shared |= dict(hidden_act="silu")
        if kind != "llama":
            shared |= dict(sliding_window=window)
    elif kind == "qwen3_moe":
        shared |= dict(hidden_act="silu", use_sliding_window=window is not None, sliding_window=window)
    else:
        names = {True: "full_attention", False: "sliding_attention"}
        shared |= dict(layer_types=[names[w is None] for w in windows], sliding_window=window)
        if kind.startswith("qwen"):
            shared |= dict(hidden_act="silu", use_sliding_window=window is not None)
    if isinstance(config, MoELMConfig):
        coefficient = config.load_balancing / _balancing_scale(config.layers, config.top_k)
        shared |= dict(num_experts_per_tok=config.top_k, router_aux_loss_coef=coefficient)
        if kind == "mixtral":
            shared |= dict(num_local_experts=config.experts)
        else:
            shared |= dict(num_experts=config.experts, norm_topk_prob=config.normalize and config.top_k > 1)
            shared |= dict(moe_intermediate_size=config.mlp, decoder_sparse_step=1, mlp_only_layers=[])
    if isinstance(config, GemmaConfig):
        shared |= dict(hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=config.logits_softcap)
        shared |= dict(attn_logit_softcapping=config.attention_softcap)
        shared |= dict(query_pre_attn_scalar=_query_scalar(config))
        if kind == "gemma3_text":
            local = config.rotary_base if config.local_rotary_base is None else config.local_rotary_base
            rope = dict(full_attention=rope, sliding_attention=_write_rope(local, None))
    return shared | dict(rope_parameters=rope)


def model_type(config: LMConfig) -> str:
    """The `model_type` of the published architecture that a config is of.

    Raises:
      ValueError: if it is of none.
    """
    windows = set(config.windows)
    if isinstance(config, GPT2Config):
        kind, fits = "gpt2", config.bias and config.window is None and config.heads == config.kv_heads
    elif isinstance(config, GemmaConfig):
        kind = "gemma3_text" if config.qk_norm else "gemma2"
        fits = not config.bias and _has_scalar(config)
    elif isinstance(config, MoELMConfig):
        kind = "qwen3_moe" if config.qk_norm else "mixtral"
        as_mixtral = config.normalize and config.top_k > 1
        fits = not config.bias and config.every == 1 and len(windows) == 1 and (config.qk_norm or as_mixtral)
    elif config.bias:
        kind, fits = "qwen2", not config.qk_norm
    elif config.qk_norm:
        kind, fits = "qwen3", True
    else:
        kind = "llama" if config.window is None else "mistral"
        fits = len(windows) == 1
    if not fits or len(windows - {None}) > 1:
        raise ValueError(f"no published architecture has all of {config}")
    return kind


def _query_scalar(config: GemmaConfig) -> int:
    """What the scale of attention is the inverse root of: a whole number in published models."""
    head_dim = config.head_dim or config.width // config.heads
    return head_dim if config.attention_scale is None else round(config.attention_scale**-2)


def _has_scalar(config: GemmaConfig) -> bool:
    """Whether the scale of attention is that of a whole number."""
    scale = config.attention_scale
    return scale is None or (scale > 0 and math.isclose(_query_scalar(config) * scale**2, 1, rel_tol=1e-6))


def _balancing_scale(layers: int, top_k: int) -> float:
    """What a weight of the loss that balances experts is multiplied by to be `load_balancing`: published
    models take its mean over layers and count each expert of a token, `MoELM` has the sum and their share."""
    return top_k / layers


class _Json:
    """The fields of a `config.json`, and what is said where one does not fit."""

    def __init__(self, fields: Mapping[str, Any], file: Path):
        self.fields, self.file = fields, file

    def get(self, name: str, default: Any = None) -> Any:
        found = self.fields.get(name)
        return default if found is None else found

    def need(self, *names: str) -> Any:
        """The first of several names that is there."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        raise ValueError(f"{self.file} has no field {names[0]!r}")

    def size(self, *names: str, default: int | None = None) -> int:
        """As `need` or, with a default, `get`: a whole number above 0.

        Raises:
          ValueError: for anything else.
        """
        found = self.need(*names) if default is None else self.get(names[0], default)
        if type(found) is not int or found < 1:
            raise ValueError(f"{self.file}: {names[0]} is {found!r}, and not a whole number above 0")
        return found

    def positive(self, name: str, default: float, within: Mapping[str, Any] | None = None) -> float:
        """A number above 0, of the fields or of an object within them."""
        found = (self.fields if within is None else within).get(name, default)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
            raise ValueError(f"{self.file}: {name} is {found!r}, and not a number above 0")
        return found

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number above 0, or None where the field is null: the default is for one that is absent."""
        return None if self.fields.get(name, default) is None else self.size(name, default=default)

    def optional_bound(self, name: str, default: float | None = None) -> float | None:
        """The same for any number above 0."""
        return None if self.fields.get(name, default) is None else self.positive(name, default or 1.0)

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        found = self.get(name, default)
        if not isinstance(found, bool):
            raise ValueError(f"{self.file}: {name} is {found!r}, and neither true nor false")
        return found

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ValueError if a field is there and says what the modules do not do."""
        found = self.fields.get(name)
        if found is not None and found not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ValueError(f"{self.file}: {name} is {found!r}, and mmnnx.modules have {choices} alone")


def _dtype(json: _Json) -> Any:
    name = json.get("dtype", json.get("torch_dtype"))
    if name is None:
        return _stored_dtype(json.file.parent)
    if name not in DTYPES.values():
        raise ValueError(f"{json.file}: dtype is {name!r}; there are {', '.join(DTYPES.values())}")
    return jnp.dtype(name)


def _stored_dtype(folder: Path) -> Any:
    """The dtype of the first tensor in a folder, as `transformers` takes it; float32 where there is none."""
    try:
        weights = Weights(folder)
    except FileNotFoundError:
        return jnp.dtype("float32")
    first = next(iter(weights.files), None)
    return jnp.dtype("float32") if first is None else weights.dtype(first)


def _shared(
    json: _Json,
    *,
    tied: bool = False,
    rms_norm_eps: float = 1e-6,
    head_dim: int | None = None,
    activation: str = "silu",
    rope: str | None = None,
    rope_theta: float = 10_000.0,
) -> dict[str, Any]:
    """What all but GPT-2 say in the same words; `rope` and `rope_theta` are as in `_read_rope`."""
    json.only("attention_bias", False)
    json.only("mlp_bias", False)
    json.only("hidden_act", activation)
    json.only("partial_rotary_factor", 1.0)
    width, heads = json.size("hidden_size"), json.size("num_attention_heads")
    base, scaling = _read_rope(json, rope, rope_theta)
    return dict(
        vocab=json.size("vocab_size"),
        layers=json.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=json.size("num_key_value_heads", default=heads),
        mlp=json.size("intermediate_size"),
        head_dim=json.size("head_dim", default=head_dim or width // heads),
        tied=json.flag("tie_word_embeddings", tied),
        norm_eps=json.positive("rms_norm_eps", rms_norm_eps),
        rotary_base=base,
        rotary_scaling=scaling,
        dtype=_dtype(json),
        param_dtype=_dtype(json),
    )


def _read_rope(
    json: _Json, kind: str | None = None, default: float = 10_000.0
) -> tuple[float, Scaling | None]:
    """Base and scaling of rotary positions; `kind` is the kind of layer, where kinds differ."""
    said = json.get("rope_parameters", json.get("rope_scaling", {}))
    said = said.get(kind, {}) if kind and isinstance(said, Mapping) else said
    if not isinstance(said, Mapping):
        raise ValueError(f"{json.file}: rotary positions are {said!r}, and not an object with fields")
    base = float(json.positive("rope_theta", json.positive("rope_theta", default), said))
    name = said.get("rope_type", said.get("type", "default"))
    if name != "default" and name not in SCALINGS:
        raise ValueError(
            f"{json.file}: rotary positions are scaled by {name!r}, and mmnnx.modules have "
            f"{', '.join(map(repr, SCALINGS))}"
        )
    plain = dict(rope_type=name, type=name, rope_theta=base, partial_rotary_factor=1.0)
    fields = {field: value for field, value in said.items() if value not in (None, plain.get(field))}
    scaling = SCALINGS.get(name)
    known = [field.name for field in dataclasses.fields(scaling)] if scaling else []
    if unknown := [field for field in fields if field not in known]:
        raise ValueError(
            f"{json.file}: {unknown[0]} of rotary positions is {fields[unknown[0]]!r}, and mmnnx.modules do "
            f"not know that of the kind {name!r}"
        )
    if scaling is None:
        return base, None
    if scaling is YarnScaling:
        fields = _complete_yarn(json, fields, kind)
    for field in known if scaling is RotaryScaling else ["factor"]:
        if field not in fields:
            raise ValueError(f"{json.file}: rotary positions of the kind {name!r} have no {field}")
    for field, value in fields.items():
        if isinstance(value, str):
            raise ValueError(f"{json.file}: {field} of rotary positions is {value!r}, and not a number")
    return base, scaling(**fields)


def _complete_yarn(json: _Json, fields: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """The fields with the original context and the factor, which follow from other fields of the config.

    As in `transformers`, an original context outside goes before one inside, where kinds of layers are alike.
    """
    original = fields.get("original_max_position_embeddings")
    if kind is None:
        original = json.get("original_max_position_embeddings", original)
    if original is None:
        original = json.need("max_position_embeddings")
    fields = fields | dict(original_max_position_embeddings=original)
    if "factor" not in fields:
        fields["factor"] = json.need("max_position_embeddings") / original
    return fields


def _write_rope(base: float, scaling: Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return dict(rope_type="default", rope_theta=base)
    name = next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
    fields = {field: value for field, value in dataclasses.asdict(scaling).items() if value is not None}
    return dict(rope_type=name, rope_theta=base, **fields)


def _windows(json: _Json, default: Callable[[int], str]) -> tuple[int | None, ...] | None:
    """The window of each layer, by the kinds of layers."""
    layers, window = json.size("num_hidden_layers"), json.optional_size("sliding_window", 4096)
    kinds = json.get("layer_types", [default(n) for n in range(layers)])
    if window is None or "sliding_attention" not in kinds:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _llama(json: _Json) -> LMConfig:
    return LMConfig(**_shared(json))


def _mistral(json: _Json) -> LMConfig:
    return LMConfig(**_shared(json), window=json.optional_size("sliding_window", 4096))


def _mixtral(json: _Json) -> MoELMConfig:
    return MoELMConfig(
        **_shared(json, rms_norm_eps=1e-5, rope_theta=1e6),
        **_routing(json, normalized=True),
        window=json.optional_size("sliding_window"),
        experts=json.size("num_local_experts"),
    )


def _routing(json: _Json, *, normalized: bool) -> dict[str, Any]:
    """How many experts a token has, and the losses of routers."""
    top_k = json.size("num_experts_per_tok")
    if top_k == 1 and normalized:
        raise ValueError(
            f"{json.file}: num_experts_per_tok is 1, and the weight of the one expert always 1; in "
            "mmnnx.modules it is the router's probability"
        )
    coefficient = json.get("router_aux_loss_coef", 0.001)
    if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or coefficient < 0:
        raise ValueError(f"{json.file}: router_aux_loss_coef is {coefficient!r}, and not a number from 0 on")
    scale = _balancing_scale(json.size("num_hidden_layers"), top_k)
    return dict(top_k=top_k, load_balancing=coefficient * scale, router_z=0.0)


def _qwen_windows(json: _Json) -> tuple[int | None, ...] | None:
    if not json.flag("use_sliding_window", False):
        return None
    first = json.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise ValueError(f"{json.file}: max_window_layers is {first!r}, and not a whole number from 0 on")
    return _windows(json, lambda n: "sliding_attention" if n >= first else "full_attention")


def _qwen2(json: _Json) -> LMConfig:
    return LMConfig(**_shared(json), window=_qwen_windows(json), bias=True)


def _qwen3(json: _Json) -> LMConfig:
    return LMConfig(**_shared(json, head_dim=128), window=_qwen_windows(json), qk_norm=True)


def _qwen3_moe(json: _Json) -> MoELMConfig:
    json.only("decoder_sparse_step", 1)
    json.only("mlp_only_layers", [])
    shared = _shared(json, head_dim=128) | dict(mlp=json.size("moe_intermediate_size"))
    normalized, windowed = json.flag("norm_topk_prob", False), json.flag("use_sliding_window", False)
    return MoELMConfig(
        **shared,
        **_routing(json, normalized=normalized),
        window=json.optional_size("sliding_window", 4096) if windowed else None,
        qk_norm=True,
        experts=json.size("num_experts", "num_local_experts"),
        normalize=normalized,
    )


def _gemma(
    json: _Json,
    windows: Any,
    *,
    rope: str | None = None,
    rope_theta: float = 10_000.0,
    softcaps: tuple[float | None, float | None] = (None, None),
    **changes: Any,
) -> GemmaConfig:
    """`softcaps` are those of attention and of logits where the fields are absent."""
    activation = "gelu_pytorch_tanh"  # by either name
    json.only("hidden_activation", activation)
    json.only("use_bidirectional_attention", False)
    rotary: dict[str, Any] = dict(rope=rope, rope_theta=rope_theta)
    shared = _shared(json, tied=True, head_dim=256, activation=activation, **rotary) | changes
    scalar = json.positive("query_pre_attn_scalar", 256)
    return GemmaConfig(
        **shared,
        window=windows,
        attention_scale=None if scalar == shared["head_dim"] else scalar**-0.5,
        attention_softcap=json.optional_bound("attn_logit_softcapping", softcaps[0]),
        logits_softcap=json.optional_bound("final_logit_softcapping", softcaps[1]),
    )


def _gemma2(json: _Json) -> GemmaConfig:
    windows = _windows(json, lambda n: "full_attention" if n % 2 else "sliding_attention")
    return _gemma(json, windows, softcaps=(50.0, 30.0))


def _gemma3(json: _Json) -> GemmaConfig:
    every = json.size("sliding_window_pattern", default=json.size("_sliding_window_pattern", default=6))
    windows = _windows(json, lambda n: "sliding_attention" if (n + 1) % every else "full_attention")
    if "rope_parameters" not in json.fields:  # as older versions wrote it
        local = json.positive("rope_local_base_freq", 10_000.0)
        return _gemma(json, windows, rope_theta=1e6, qk_norm=True, local_rotary_base=local)
    local, scaling = _read_rope(json, "sliding_attention")
    if scaling is not None:
        raise ValueError(
            f"{json.file}: rotary positions of sliding_attention are scaled, and in mmnnx.modules those of "
            "full_attention alone"
        )
    rope = "full_attention"
    return _gemma(json, windows, rope=rope, rope_theta=1e6, qk_norm=True, local_rotary_base=local)


def _gpt2(json: _Json) -> GPT2Config:
    json.only("activation_function", "gelu_new")
    json.only("scale_attn_weights", True)
    json.only("scale_attn_by_inverse_layer_idx", False)
    json.only("add_cross_attention", False)
    width, heads = json.size("n_embd"), json.size("n_head")
    return GPT2Config(
        vocab=json.size("vocab_size"),
        layers=json.size("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        mlp=json.size("n_inner", default=4 * width),
        positions=json.size("n_positions"),
        norm_eps=json.positive("layer_norm_epsilon", 1e-5),
        tied=json.flag("tie_word_embeddings", True),
        dtype=_dtype(json),
        param_dtype=_dtype(json),
    )


SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "llama3": RotaryScaling,
    "yarn": YarnScaling,
}

READERS: dict[str, Callable[[_Json], LMConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
