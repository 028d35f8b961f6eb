"""Text from a trained model."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import mmnnx as mm
from mmnnx.modules.generate import generate


def sample(
    model: nnx.Module, prompt: bytes, count: int, window: int, *, seed: int = 0, temperature: float = 0.8
) -> bytes:
    """`prompt` and the `count` bytes that the model generates after it, from at most `window` bytes before.

    When the window is full, its second half is the next prompt. An empty prompt stands for the start of a
    line. Every process gets the same text.
    """
    text, key = bytearray(prompt or b"\n"), jax.random.key(seed)
    total = len(text) + count
    while len(text) < total:
        key, rng = jax.random.split(key)
        recent = np.frombuffer(bytes(text[-max(1, window // 2) :]), np.uint8).astype(np.int32)
        room = max(1, window - len(recent))
        tokens = mm.fetch(generate(model, recent[None], room, temperature=temperature, rng=rng))
        text += tokens[0].astype(np.uint8).tobytes()
    return bytes(text[:total])[0 if prompt else 1 :]
