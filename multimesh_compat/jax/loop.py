"""`microbatch` with the published order of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmnnx as mm


def microbatch(
    fun: Callable[..., Any],
    dim: int,
    size: int,
    argnum: int = 0,
    schedule: str | None = None,
    num_stages: int | None = None,
    interleave: int | None = None,
    unrolling: int | None = None,
    arg_shardings: Any = None,
    custom_schedule: Any = None,
    **options: Any,
) -> Callable[..., Any]:
    """`mmnnx.microbatch`, with arguments that may be given by position; `reduce` and the rest by name.

    Example:
      >>> loss = lambda w, x: ((x @ w) ** 2).mean()
      >>> in_parts = microbatch(jax.value_and_grad(loss), 0, 4, 1, "1f1b")  # dim, size, argnum, schedule
      >>> value, grads = mjit(lambda w, x: in_parts(w, x))(jnp.ones((4, 2)), jnp.ones((16, 4)))
    """
    given = {
        "schedule": schedule,
        "num_stages": num_stages,
        "interleave": interleave,
        "unrolling": unrolling,
        "arg_shardings": arg_shardings,
        "custom_schedule": custom_schedule,
    }
    return mm.microbatch(fun, dim, size, argnum, **given, **options)
