"""The exponential moving average of the weights that are trained (Polyak and Juditsky 1992)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class AverageState(NamedTuple):
    """The average is optimizer state, so it lives, is sharded, donated and saved as that is.

    Attributes:
      steps: how many it is over, int32.
      weights: the average, like the parameters; see `averaged` for what is here in a checkpoint.
    """

    steps: jax.Array
    weights: Any


def average_weights(decay: float) -> optax.GradientTransformation:
    """Averages the parameters after each step, and leaves the updates as they are; the last of a chain.

    A step counts `decay` times as much as the one after it. The sum of these weights is divided out, as Adam
    does (arXiv:1412.6980), so that the first values, random or published, count for nothing: after one step
    the average is the parameters.

    Args:
      decay: above 0, below 1; the average is over about 1 / (1 - decay) steps.

    Example:
      >>> rule = optax.chain(optax.sgd(0.1), average_weights(0.99))
    """

    def init(params: Any) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: AverageState, params: Any = None) -> tuple[Any, AverageState]:
        steps = optax.safe_increment(state.steps)
        share = (1 - decay) / -jnp.expm1(steps * math.log(decay))  # of this step: (1 - d) / (1 - d^steps)
        new = optax.apply_updates(params, updates)
        return updates, AverageState(steps, optax.incremental_update(new, state.weights, share))

    return optax.GradientTransformation(init, update)


@contextlib.contextmanager
def averaged(model: nnx.Module, optimizer: nnx.Optimizer) -> Iterator[None]:
    """Inside, the model has the averages of its weights, and the optimizer's state has the weights.

    So a checkpoint that is saved inside has the averages as its model. Nothing is copied. Without averages
    nothing changes.
    """
    if not isinstance(optimizer.opt_state[-1], AverageState):
        yield
        return
    _exchange(model, optimizer)
    try:
        yield
    finally:
        _exchange(model, optimizer)


def _exchange(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    average = optimizer.opt_state[-1].weights
    weights, averages = (nnx.as_pure(x) for x in (nnx.state(model, optimizer.wrt), average))
    nnx.update(model, averages)
    nnx.update(average, weights)
