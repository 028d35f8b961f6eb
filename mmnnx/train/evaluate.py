"""The loss of a model on batches, in validations and in ``mmnnx eval``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

import mmnnx as mm
from mmnnx.modules import LM
from mmnnx.train.rows import Row

# Batches that are under way at once: devices never wait for one, and hold the inputs of no more.
IN_FLIGHT = 8


def make_evaluate() -> Callable[[LM, Iterable[Row]], tuple[float, float]]:
    """``evaluate(model, batches)``: the cross-entropy of the labels of all batches, each times its weight, in
    nats; and the sum of their weights."""
    eval_step = mm.jit(cross_entropy)

    def evaluate(model: LM, batches: Iterable[Row]) -> tuple[float, float]:
        total = labels = 0.0
        losses: deque[jax.Array] = deque()
        for batch in batches:
            losses.append(eval_step(model, batch))
            labels += float(batch["weights"].sum())
            if len(losses) > IN_FLIGHT:
                total += float(mm.fetch(losses.popleft()))
        return total + float(np.sum(mm.fetch([*losses]))), labels

    return evaluate


def make_validate(held_out: Sequence[Row]) -> Callable[[LM], float]:
    """``validate(model)``: mean cross-entropy over the labels of these batches, in nats per token."""
    evaluate = make_evaluate()

    def validate(model: LM) -> float:
        total, labels = evaluate(model, held_out)
        return total / labels

    return validate


def cross_entropy(model: LM, batch: Row) -> jax.Array:
    """Of each label, times its weight; without the losses that routers add in training."""
    return model.cross_entropy(**batch)
