"""Text from a trained model."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import mmnnx as mm
from mmnnx.modules.generate import generate


def sample(
    model: nnx.Module, prompt: np.ndarray, count: int, window: int, *, seed: int = 0, temperature: float = 0.8
) -> np.ndarray:
    """The tokens of a prompt, and `count` that the model generates after it, from at most `window` before.

    When the window is full, its second half is the next prompt. Every process gets the same.

    Args:
      prompt: integers [at least 1].

    Returns:
      int32 [len(prompt) + count].
    """
    tokens, key = prompt.astype(np.int32), jax.random.key(seed)
    total = len(tokens) + count
    while len(tokens) < total:
        key, own = jax.random.split(key)
        recent = tokens[-max(1, window // 2) :]
        room = max(1, window - len(recent))
        made = mm.fetch(generate(model, recent[None], room, temperature=temperature, key=own))
        tokens = np.concatenate([tokens, made[0].astype(np.int32)])
    return tokens[:total]
