"""Text from a trained model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import mmnnx as mm
from mmnnx.modules import LM


def sample(
    model: LM, prompt: bytes, count: int, window: int, *, seed: int = 0, temperature: float = 0.8
) -> bytes:
    """``prompt`` and ``count`` bytes that the model continues it with, looking back over ``window`` bytes.

    Each byte takes one forward pass over the whole window: one shape, compiled once, no cache to keep.
    """

    def next_token(model, tokens, last, key):
        return jax.random.categorical(key, model(tokens)[0, last] / temperature)

    next_token = mm.jit(next_token)
    text = bytearray(prompt)
    for key in jax.random.split(jax.random.key(seed), count):
        recent = text[-window:]
        tokens = np.frombuffer(bytes(recent.ljust(window, b"\0")), np.uint8).astype(np.int32)
        text.append(int(next_token(model, tokens[None], jnp.int32(len(recent) - 1), key)))
    return bytes(text)
