"""The cross-entropy of a large vocabulary, over parts of the sequence: not all logits are there at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def mean_cross_entropy(
    logits: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    labels: jax.Array,
    chunks: int = 1,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy, in nats, of labels under logits that are made of `x` chunk by chunk.

    A chunk's logits are made once more in the backward, instead of being kept: with 8 chunks an eighth of the
    memory, for one more matrix product with the vocabulary.

    Args:
      logits: from [batch, length, width] to float32 [batch, length, vocab], position by position.
      x: [batch, length, width].
      labels: int [batch, length].
      chunks: parts of the length; 1 makes all logits at once. A part is every so many positions.
      weights: float [batch, length], of the labels: what is returned is then the sum of cross-entropy times
        weight. Default: equal weights with a sum of one, the mean. Where it is 0 any label will do.

    Raises:
      ValueError: if `chunks` does not divide the length, and for labels or weights of another shape than
        [batch, length].

    Example:
      >>> lm = LM(LMConfig(layers=1), rngs=nnx.Rngs(0))
      >>> mean_cross_entropy(lm.logits, lm.hidden(batch[:, :-1]), batch[:, 1:], chunks=4).shape
      ()
    """
    for name, given in (("labels", labels), ("weights", weights)):
        if given is not None and given.shape != x.shape[:2]:
            raise ValueError(f"{name} are {list(given.shape)}, and what they are for {list(x.shape[:2])}")
    if weights is None:
        weights = jnp.full(labels.shape, 1 / labels.size, jnp.float32)
    else:
        labels = jnp.where(weights == 0, 0, labels)  # optax makes NaN of one that is no token, such as -100
    if chunks == 1:
        return (optax.softmax_cross_entropy_with_integer_labels(logits(x), labels) * weights).sum()
    batch, length = labels.shape
    if chunks < 1 or length % chunks:
        raise ValueError(f"a sequence of {length} is not divisible into {chunks} chunks of the loss")

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, labels, weights = part
        values = optax.softmax_cross_entropy_with_integer_labels(logits(x), labels)
        return total + (values * weights).sum(), None

    # Every position that is `chunks` further on: where devices have parts of the sequence, all have some.
    parts = [jnp.moveaxis(a.reshape(batch, -1, chunks, *a.shape[2:]), 2, 0) for a in (x, labels, weights)]
    zero = jnp.zeros((), jnp.promote_types(weights.dtype, jnp.float32))
    total, _ = jax.lax.scan(add, zero, tuple(parts))
    return total
