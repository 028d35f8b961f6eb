"""Rotary positions (RoPE, arXiv:2104.09864), and the scaling of its frequencies to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3.1 (arXiv:2407.21783) stretches rotary frequencies to contexts longer than those trained on.

    A frequency that turns more than `high_freq_factor` times within the original context is kept, one that
    turns less than `low_freq_factor` times is divided by `factor`, and those between change over smoothly.
    The defaults are those of Llama 3.1; Llama 3.2 has `factor=32`.

    Raises:
      ValueError: a factor that is not positive, or a low one that is not below the high one.

    Example:
      >>> rotary_frequencies(128, 500_000.0, RotaryScaling()).shape
      (64,)
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    magnitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if min(self.factor, self.low_freq_factor, self.original_max_position_embeddings) <= 0:
            raise ValueError(f"factors and lengths of {self} must be above zero")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor of {self} must be below its high_freq_factor")

    def __call__(self, frequencies: jax.Array, base: float) -> jax.Array:
        """`frequencies`, in radians a position, as they are for the longer context."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """Positions as if they were `factor` times closer to each other (arXiv:2306.15595), as in Gemma 3.

    Raises:
      ValueError: a factor that is not positive.

    Example:
      >>> rotary_frequencies(4, scaling=LinearScaling(8.0)).shape
      (2,)
    """

    factor: float

    magnitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"the factor of {self} must be above zero")

    def __call__(self, frequencies: jax.Array, base: float) -> jax.Array:
        """`frequencies`, in radians a position, as they are for the longer context."""
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): short wavelengths are kept, long ones stretched, and scores made sharper.

    Pairs of features that turn more than `beta_fast` times within the original context are kept, those that
    turn less than `beta_slow` times are divided by `factor`, and those between change over smoothly, by their
    index. Fields are named, and completed, as `transformers` does.

    Args:
      factor: how much longer the context is than the original one.
      original_max_position_embeddings: the original context, in positions.
      beta_fast, beta_slow: turns within the original context.
      attention_factor: what queries and keys are multiplied by, so that scores are by its square. Default:
        0.1 ln(factor) + 1; or, if both of the following are given, the quotient of 0.1 m ln(factor) + 1 with
        `mscale` and with `mscale_all_dim` for m.
      truncate: round the range of indices that change over to whole ones, outward.

    Raises:
      ValueError: a factor, length or number of turns that is not positive; a `beta_slow` above `beta_fast`.

    Example:
      >>> rotary_frequencies(128, 1_000_000.0, YarnScaling(4.0, 32_768)).shape  # as Qwen 2.5 has it
      (64,)
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        given = (self.factor, self.original_max_position_embeddings, self.beta_slow, self.attention_factor)
        if any(value is not None and value <= 0 for value in given):
            raise ValueError(f"factors, lengths and turns of {self} must be above zero")
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow of {self} must not be above its beta_fast")

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied by."""

        def grown(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def __call__(self, frequencies: jax.Array, base: float) -> jax.Array:
        """`frequencies`, in radians a position, as they are for the longer context."""
        pairs = len(frequencies)

        def index(turns: float) -> float:
            """That of the pair which turns so often within the original context."""
            wavelength = self.original_max_position_embeddings / turns
            return pairs * math.log(wavelength / (2 * math.pi)) / math.log(base)

        start, end = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, 2 * pairs - 1)
        divided = (jnp.arange(pairs, dtype=jnp.float32) - start) / ((end - start) or 0.001)
        divided = jnp.clip(divided, 0.0, 1.0)
        return frequencies * (1.0 - divided + divided / self.factor)


Scaling = RotaryScaling | LinearScaling | YarnScaling


def rotary_frequencies(head_dim: int, base: float = 10_000.0, scaling: Scaling | None = None) -> jax.Array:
    """What each pair of features turns by from one position to the next, in radians: float32 [head_dim / 2].

    Pair i turns by `base ** (-2 i / head_dim)`, which `scaling` may then change.

    Raises:
      ValueError: an odd `head_dim`.

    Example:
      >>> [round(float(f), 3) for f in rotary_frequencies(4)]
      [1.0, 0.01]
    """
    if head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of features, and a head has {head_dim}: use an even size"
        )
    half = head_dim // 2
    frequencies = jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return frequencies if scaling is None else scaling(frequencies, base)


def rotary(
    x: jax.Array, positions: jax.Array, base: float = 10_000.0, scaling: Scaling | None = None
) -> jax.Array:
    """Turns each pair of features of `x` by an angle that grows with the position.

    Feature i is paired with feature i + head_dim / 2 (the halves convention, as `transformers` has it for
    Llama; weights made for neighbouring pairs have to be permuted). Angles are computed in float32.

    Args:
      x: [batch, length, heads, head_dim], queries or keys.
      positions: int [length], or [batch, length] where rows differ.
      base: of the geometric series of wavelengths.
      scaling: what is done to the frequencies, and in YaRN to the size of `x`.

    Returns:
      The same shape and dtype as `x`.

    Raises:
      ValueError: an odd `head_dim`, an `x` without four dimensions, or positions of another shape.
      TypeError: positions that are not integers.

    Example:
      >>> rotary(jnp.ones((2, 5, 4, 8)), jnp.arange(5)).shape
      (2, 5, 4, 8)
    """
    if x.ndim != 4 or positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            f"rotary positions are [length] or [batch, length] for an x of [batch, length, heads, head_dim]; "
            f"they are {positions.shape}, and x is {x.shape}"
        )
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"rotary positions are integers, not {positions.dtype}")
    angle = positions[..., None, None] * rotary_frequencies(x.shape[-1], base, scaling)
    size = 1.0 if scaling is None else scaling.magnitude
    cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)  # float32 once multiplied
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
