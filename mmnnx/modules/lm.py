"""A decoder-only transformer language model of the shape of Llama and Qwen: one config, one file.

It is an ordinary Flax NNX model and knows nothing of pipelines. Each weight records the logical names of its
axes (`vocab`, `embed`, `heads`, `kv_heads`, `mlp`), which a `mmnnx.Task` maps to the axes of its mesh.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.attention import Attention
from mmnnx.modules.cross_entropy import mean_cross_entropy
from mmnnx.modules.embed import Embed
from mmnnx.modules.linear import Linear
from mmnnx.modules.logical import constrain
from mmnnx.modules.mlp import SwiGLU
from mmnnx.modules.norm import RMSNorm
from mmnnx.modules.presets import PRESETS
from mmnnx.modules.rotary import Scaling
from mmnnx.modules.stack import Stack, apply_layers
from mmnnx.sharding.incompatible_devices import advising

SMALL = nnx.initializers.normal(0.02)  # logits near zero: the first loss is that of a uniform guess


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """The sizes of an `LM`.

    Args:
      vocab: number of tokens.
      layers: number of blocks.
      width: features of a token between blocks.
      heads: attention heads.
      kv_heads: key-value heads, each shared by heads / kv_heads attention heads.
      mlp: features inside a block's feed-forward layer.
      tied: the embedding is the output layer too.
      dtype: what activations are computed in, and a cache holds.
      param_dtype: what weights are kept in.
      head_dim: features of a head. Default: width / heads.
      rotary_base: base of the wavelengths of rotary positions.
      rotary_scaling: the scaling of their frequencies.
      norm_eps: the epsilon of norms.
      bias: queries, keys and values have biases (Qwen2).
      qk_norm: queries and keys are normalised (Qwen3).
      window: each token sees the last `window` tokens, itself included. Default: all. A tuple has one for
        each block.
      scan: blocks are stacked and scanned, which compiles one for all (see `Stack`): True, or the number of
        segments, one or more for each stage of a pipeline.
      remat: the backward computes each block again: True, or a policy of `jax.checkpoint`.
      loss_chunks: `loss` makes the logits of so many parts of the sequence one after the other.
      attention_chunks: so are the scores of attention, for so many parts of the queries.
      attention: the implementation of attention, as in `Attention`: "cudnn" for GPUs, "flash" for TPUs,
        "ring" for sequences that are divided over devices.

    Raises:
      ValueError: sizes that do not fit each other.

    Example:
      >>> LMConfig(layers=2, width=64).layers
      2
    """

    vocab: int = 256
    layers: int = 8
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    tied: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    head_dim: int | None = None
    rotary_base: float = 10_000.0
    rotary_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    bias: bool = False
    qk_norm: bool = False
    window: int | tuple[int | None, ...] | None = None
    scan: bool | int = False
    remat: Any = False
    loss_chunks: int = 1
    attention_chunks: int = 1
    attention: Literal["xla", "cudnn", "flash", "ring"] | None = None

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    norm: ClassVar[Any] = RMSNorm

    def __post_init__(self):
        sizes = ("vocab", "layers", "width", "heads", "kv_heads", "mlp", "loss_chunks", "attention_chunks")
        for name in sizes:
            _check_size(name, getattr(self, name))
        for name, size in (("head_dim", self.head_dim), *(("window", size) for size in self.windows)):
            if size is not None:
                _check_size(name, size)
        for name in ("norm_eps", "rotary_base"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: it is a number above 0")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if (self.head_dim or self.width // self.heads) % 2:
            of = "" if self.head_dim else f"width {self.width} over {self.heads} heads leaves "
            raise ValueError(
                f"{of}{self.head_dim or self.width // self.heads} features a head; "
                "rotary positions need an even number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not divisible by {self.kv_heads} key-value heads")
        if len(self.windows) != self.layers:
            raise ValueError(f"there are {len(self.windows)} windows for {self.layers} blocks")
        if self.scan and len(set(self.windows)) > 1:
            raise ValueError(f"scan stacks blocks of one kind, and these have windows {self.windows}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each block.

        Example:
          >>> LMConfig(layers=2, window=512).windows
          (512, 512)
        """
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    def of_block(self, index: int) -> Self:
        """The config that block number `index` is made with: its own window."""
        if isinstance(self.window, tuple):
            return dataclasses.replace(self, window=(self.window[index],) * self.layers)
        return self

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LMConfig:
        """The config of a published model, with changes.

        Args:
          name: one of `presets`: "llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b", "qwen2.5-7b",
            "qwen3-8b", or "tiny", which a laptop trains.
          **changes: fields to set otherwise.

        Raises:
          ValueError: a name that is none of these.

        Example:
          >>> LMConfig.preset("llama3-8b", layers=2).width
          4096
        """
        if name not in cls.presets:
            raise ValueError(f"there is no preset {name!r}: there are {', '.join(map(repr, cls.presets))}")
        return cls(**{**cls.presets[name], **changes})


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, numbers.Integral):
        raise ValueError(f"{name}={size!r}: it is a whole number")
    if size < 1:
        raise ValueError(f"{name}={size}: a model has at least one")


class Block(nnx.Module):
    """One pre-norm transformer block: [batch, length, width] to the same, at first unchanged.

    A subclass overrides `make_attention` or `make_mlp`.

    Example:
      >>> block = Block(LMConfig(width=64), rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 8, 64))).shape
      (2, 8, 64)
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention: Any = self.make_attention(config, rngs)
        self.mlp_norm = make_norm(config, rngs)
        self.mlp = self.make_mlp(config, rngs)

    def make_attention(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        return causal_attention(config, rngs)

    def make_mlp(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        zeros = nnx.initializers.zeros
        return SwiGLU(config.width, config.mlp, out_init=zeros, rngs=rngs, **types(config))

    def __call__(self, x: jax.Array, *, cache: Any = None, **options: Any) -> Any:
        """[batch, length, width] to the same; with a cache, (that, the next cache).

        `options` are those of `Attention`: `positions`, `segment_ids`.
        """
        x, cache = self.attend(x, cache, **options)
        x = x + self.mlp(self.mlp_norm(x))
        return x if cache is None else (x, cache)

    def attend(self, x: jax.Array, cache: Any, **options: Any) -> tuple[jax.Array, Any]:
        """The first half: (`x` [batch, length, width] and what attention adds to it, the next cache)."""
        x = constrain(x, "batch", "sequence", "embed")
        y = self.attention(self.attention_norm(x), cache=cache, **options)
        y, cache = (y, None) if cache is None else y
        return x + y, cache

    def init_cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for `capacity` tokens a row."""
        return self.attention.init_cache(batch, capacity)


class LM(nnx.Module):
    """Next-token model: pre-norm blocks of rotary grouped-query attention and a SwiGLU.

    A subclass overrides `make_block`, or `embedded`, `hidden` or `logits`, the parts of a call, or
    `loss_of_labels`, that of a loss.

    Attributes:
      source: the folder that its weights were loaded from, by `mmnnx.modules.hf.load`.

    Example:
      >>> model = LM(LMConfig(layers=2), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
    """

    source: str | None = None

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = SMALL if config.tied else nnx.initializers.normal(0.2)
        self.embed = Embed(config.vocab, config.width, embedding_init=init, rngs=rngs, **types(config))
        self.blocks: Any
        if config.scan:
            make, segments = (lambda rngs: self.make_block(0, rngs)), int(config.scan)
            self.blocks = Stack(make, config.layers, segments=segments, rngs=rngs, remat=config.remat)
        else:
            self.blocks = nnx.List([self.make_block(n, rngs) for n in range(config.layers)])
        self.norm = make_norm(config, rngs)
        if not config.tied:
            names: dict[str, Any] = dict(kernel_axes=("embed", "vocab"), use_bias=False)
            self.head = Linear(
                config.width, config.vocab, kernel_init=SMALL, rngs=rngs, **names, **types(config)
            )

    def make_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index`; where blocks are scanned, all are made as number 0 is."""
        return Block(self.config.of_block(index), rngs=rngs)

    @advising
    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Any = None,
    ) -> Any:
        """Logits of what follows each token.

        Args:
          tokens: int [batch, length].
          positions: int [batch, length] or [length]. Default: 0, 1, ..., after those in the cache.
          segment_ids: int [batch, length]: tokens see those of their own segment alone (packed documents).
            Not with a cache.
          cache: of the tokens before these, from `init_cache` or an earlier call.

        Returns:
          float32 [batch, length, vocab]; with a cache, (that, the next cache).
        """
        x = self.hidden(tokens, positions=positions, segment_ids=segment_ids, cache=cache)
        if cache is None:
            return self.logits(x)
        x, cache = x
        return self.logits(x), cache

    def embedded(self, tokens: jax.Array, *, cache: Any = None, **options: Any) -> jax.Array:
        """The input of the first block: [batch, length, width]."""
        return constrain(self.embed(tokens), "batch", "sequence", "embed")

    def hidden(self, tokens: jax.Array, *, cache: Any = None, **options: Any) -> Any:
        """The output of the last block: [batch, length, width]; with a cache, (that, the next cache)."""
        x = self.embedded(tokens, cache=cache, **options)
        if self.config.scan:
            return self.blocks(x, cache=cache, **options)
        return apply_layers(self.blocks, x, cache=cache, remat=self.config.remat, **options)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits float32 [batch, length, vocab] from what `hidden` returns."""
        x = self.norm(x)
        logits = self.embed.attend(x) if self.config.tied else self.head(x)
        return constrain(logits.astype(jnp.float32), "batch", "sequence", "vocab")

    def init_cache(self, batch: int, capacity: int) -> Any:
        """Empty caches for `capacity` tokens in each of `batch` rows: one for each block or segment."""
        if self.config.scan:
            return self.blocks.init_cache(batch, capacity)
        return [block.init_cache(batch, capacity) for block in self.blocks]

    @advising
    def loss(
        self,
        tokens: jax.Array,
        *,
        labels: jax.Array | None = None,
        weights: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """What training minimises: mean cross-entropy of what follows each token, in nats.

        A `MoELM` adds the losses of its routers; see `cross_entropy`.

        Args:
          tokens: int [batch, length].
          labels: int [batch, length], what follows each. Default: `tokens[:, 1:]`, after `tokens[:, :-1]`.
          weights: float [batch, length], of the labels. In place of the mean, the sum of their cross-entropy
            times weight is returned: a weight of zero is a token without loss, such as padding, and with
            weights that sum to one over a step the sum over its microbatches is the mean, however many
            tokens each has.
          **options: `positions` and `segment_ids` of `tokens`, as of a call.

        Raises:
          ValueError: for rows of one token, without labels.

        Example:
          >>> lm = LM(LMConfig(layers=1), rngs=nnx.Rngs(0))
          >>> tokens, labels = jnp.array([[5, 6, 7, 8, 9, 0]]), jnp.array([[6, 7, 1, 9, 1, 0]])
          >>> segments = jnp.array([[1, 1, 1, 2, 2, 0]])  # two documents and padding
          >>> options = dict(positions=jnp.array([[0, 1, 2, 0, 1, 0]]), segment_ids=segments)
          >>> lm.loss(tokens, labels=labels, weights=(segments > 0) / 5, **options).shape
          ()
        """
        tokens, labels = _with_labels(tokens, labels)
        return self.loss_of_labels(tokens, labels, weights, **options)

    def cross_entropy(
        self,
        tokens: jax.Array,
        *,
        labels: jax.Array | None = None,
        weights: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """The cross-entropy of `loss`, without the losses of routers: its exponential is the perplexity.

        Arguments are those of `loss`.

        Example:
          >>> lm = LM(LMConfig(layers=1), rngs=nnx.Rngs(0))
          >>> lm.cross_entropy(jnp.array([[5, 6, 7, 8]])).shape
          ()
        """
        tokens, labels = _with_labels(tokens, labels)
        x = self.hidden(tokens, **options)
        return mean_cross_entropy(self.logits, x, labels, self.config.loss_chunks, weights)

    def loss_of_labels(
        self, tokens: jax.Array, labels: jax.Array, weights: jax.Array | None, **options: Any
    ) -> jax.Array:
        """What `loss` returns, with the labels there."""
        return self.cross_entropy(tokens, labels=labels, weights=weights, **options)


def _with_labels(tokens: jax.Array, labels: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Tokens and what follows each: other tokens of its row, if nothing else is given."""
    if labels is not None:
        return tokens, labels
    if tokens.shape[1] < 2:
        raise ValueError(f"rows of {tokens.shape[1]} tokens have no next one: give two or more, or labels=")
    return tokens[:, :-1], tokens[:, 1:]


def causal_attention(config: LMConfig, rngs: nnx.Rngs, **options: Any) -> Attention:
    """The attention of a block, with other options of `Attention`."""
    usual: dict[str, Any] = dict(
        causal=True,
        window=config.windows[0],
        rotary_base=config.rotary_base,
        rotary_scaling=config.rotary_scaling,
        qk_norm=config.qk_norm,
        norm_epsilon=config.norm_eps,
        bias=config.bias,
        chunks=config.attention_chunks,
        implementation=config.attention,
        out_init=nnx.initializers.zeros,
        rngs=rngs,
        **types(config),
    )
    return Attention(config.width, config.heads, config.kv_heads, config.head_dim, **(usual | options))


def make_norm(config: LMConfig, rngs: nnx.Rngs) -> Any:
    return config.norm(config.width, epsilon=config.norm_eps, rngs=rngs, **types(config))


def types(config: Any) -> dict[str, Any]:
    """The types that a config asks its layers to compute in and to keep weights in."""
    return dict(dtype=config.dtype, param_dtype=config.param_dtype)
