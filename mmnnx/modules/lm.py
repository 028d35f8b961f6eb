"""A decoder-only transformer language model: one config, one file.

It is an ordinary Flax NNX model and knows nothing of pipelines. What it offers them is names: each weight
carries the logical names of its axes (``vocab``, ``embed``, ``heads``, ``kv_heads``, ``mlp``), which a
`mmnnx.Task` maps to the axes of its mesh.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """The sizes of an `LM`.

    ``dtype`` is the type activations are computed in; weights are always kept in float32.
    Raises ValueError for sizes that do not fit each other.
    """

    vocab: int = 256
    layers: int = 8
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    tied: bool = False
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads leaves {self.head_dim} features a head; "
                "rotary positions need an even number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not divisible by {self.kv_heads} key-value heads")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class LM(nnx.Module):
    """Next-token model: pre-norm blocks of rotary grouped-query attention and a SwiGLU.

    >>> model = LM(LMConfig(layers=2), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 16), jnp.int32)).shape
    (1, 16, 256)
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.config = config
        small = nnx.initializers.normal(0.02)  # logits near zero: the first loss is that of a uniform guess
        self.embed = nnx.Embed(
            config.vocab,
            config.width,
            dtype=config.dtype,
            embedding_init=named(small if config.tied else nnx.initializers.normal(0.2), "vocab", "embed"),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = rms_norm(config, rngs)
        if not config.tied:
            self.head = linear(config, config.width, config.vocab, ("embed", "vocab"), rngs, small)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits float32 [batch, length, vocab] of what follows each of ``tokens`` int [batch, length]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.config.tied else self.head(x)
        return logits.astype(jnp.float32)

    def loss(self, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats a token, of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``."""
        logits = self(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class Block(nnx.Module):
    """One pre-norm transformer block: [batch, length, width] to the same, at first unchanged."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several query heads share one key-value head."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = linear(config, config.width, queries, ("embed", "heads"), rngs)
        self.key = linear(config, config.width, keys, ("embed", "kv_heads"), rngs)
        self.value = linear(config, config.width, keys, ("embed", "kv_heads"), rngs)
        self.out = linear(config, queries, config.width, ("heads", "embed"), rngs, nnx.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape

        def by_head(y):
            return y.reshape(batch, length, -1, self.head_dim)

        query, key, value = (by_head(project(x)) for project in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(y.reshape(batch, length, -1))


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config, config.width, config.mlp, ("embed", "mlp"), rngs)
        self.up = linear(config, config.width, config.mlp, ("embed", "mlp"), rngs)
        self.down = linear(config, config.mlp, config.width, ("mlp", "embed"), rngs, nnx.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions for ``x`` [batch, length, heads, d]: pair i turns by position * base^(-2i/d)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def linear(config, inputs: int, outputs: int, axes: tuple[str, str], rngs, init=None) -> nnx.Linear:
    init = named(init or nnx.initializers.lecun_normal(), *axes)
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, kernel_init=init, rngs=rngs)


def rms_norm(config: LMConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    init = named(nnx.initializers.ones, "embed")
    return nnx.RMSNorm(config.width, dtype=config.dtype, scale_init=init, rngs=rngs)


def named(init: nnx.Initializer, *axes: str) -> nnx.Initializer:
    """``init``, recording the logical names of the axes it makes.

    Eager sharding is off because the names are not those of any mesh: Flax would otherwise look them up in
    whatever mesh is current when the model is built.
    """
    return nnx.with_partitioning(init, axes, eager_sharding=False)
