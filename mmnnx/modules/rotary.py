"""Rotary positions (RoPE, arXiv:2104.09864), and the scaling of its frequencies to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if min(self.factor, self.low_freq_factor, self.original_max_position_embeddings) <= 0:
            raise ValueError(f"factors and lengths of {self} must be above zero")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor of {self} must be below its high_freq_factor")

    def __call__(self, frequencies: jax.Array) -> jax.Array:
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

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"the factor of {self} must be above zero")

    def __call__(self, frequencies: jax.Array) -> jax.Array:
        """`frequencies`, in radians a position, as they are for the longer context."""
        return frequencies / self.factor


Scaling = RotaryScaling | LinearScaling


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
    return frequencies if scaling is None else scaling(frequencies)


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
      scaling: what is done to the frequencies.

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
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)  # float32 once multiplied
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
