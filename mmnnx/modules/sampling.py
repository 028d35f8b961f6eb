"""Sampling: which tokens may be drawn, by their logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def filter_logits(
    logits: jax.Array,
    temperature: Any = 1.0,
    top_k: int | None = None,
    top_p: Any = None,
) -> jax.Array:
    """Logits of the distribution that tokens are drawn from: -inf for those that are not.

    That of the likeliest token is 0. Tokens as likely as the last that is kept are kept too.

    Args:
      logits: [..., vocab].
      temperature: what they are divided by, 1.2e-38 (the smallest normal float32) or above.
      top_k: the `top_k` likeliest tokens are kept.
      top_p: of these, the fewest likeliest tokens are kept whose probabilities sum up to `top_p` at least.

    Returns:
      float32 [..., vocab].

    Example:
      >>> filter_logits(jnp.log(jnp.array([0.5, 0.3, 0.2])), top_p=0.6)[2]
      Array(-inf, dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # First the largest becomes 0, so that a low temperature does not make several infinite.
    logits = (logits - jnp.where(jnp.isfinite(largest), largest, 0)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        last = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < last, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < top_p  # what the likelier ones sum up to
        last = jnp.min(ordered, axis=-1, keepdims=True, where=kept, initial=jnp.inf)
        logits = jnp.where(logits < last, -jnp.inf, logits)
    return logits


def check_choice(temperature: float, top_k: int | None, top_p: float | None, key: Any) -> None:
    """Refuses options of `mmnnx.modules.generate` that do not go together.

    Raises:
      ValueError: one out of range, a key that is lacking, or options for drawing where nothing is drawn.
      TypeError: `key` is not a key.
    """
    kind = np.finfo(np.float32)  # in which logits are divided; devices take what is smaller for 0
    least, most = float(kind.tiny), float(kind.max)
    if temperature != 0 and not least <= temperature <= most:
        likeliest = "0 (the likeliest token)"
        raise ValueError(f"temperature={temperature}: it is {likeliest} or from {least:.1e} to {most:.1e}")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature} draws tokens, and needs a key: key=jax.random.key(0)")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("top_k= and top_p= are for drawing, and temperature=0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: at least one token must be left")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: it is a probability above 0")
    if not isinstance(key, jax.Array | None):
        raise TypeError(f"key={key!r} is no PRNG key: give jax.random.key(0), or one of a stream, rngs()")
