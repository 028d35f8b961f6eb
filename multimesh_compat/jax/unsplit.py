"""The warning, once in a process, about a task that is traced where it will not be split."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import mmnnx as mm
from mmnnx._compat import under_jit
from mmnnx.sharding.task_scope import ignoring, splitting

_tracing_shapes: ContextVar[bool] = ContextVar("multimesh_tracing_shapes", default=False)
_warned = False


@contextlib.contextmanager
def tracing_shapes() -> Iterator[None]:
    """Inside, functions are traced for their shapes alone: `warn_unsplit` says nothing.

    Example:
      >>> with tracing_shapes():
      ...     shapes = jax.eval_shape(jnp.sin, 1.0)
    """
    token = _tracing_shapes.set(True)
    try:
        yield
    finally:
        _tracing_shapes.reset(token)


def warn_unsplit(task: mm.Task) -> None:
    """Warns, once in a process, if a task is called while JAX traces outside `mm.jit`: it will not be split.

    Where nothing is traced (an eager call, also under `jax.grad` or `jax.vmap`) it says nothing. A function
    traced by `jax.eval_shape` cannot be told from one traced by `jax.jit`: see `tracing_shapes`.

    Example:
      >>> warn_unsplit(mm.Task("dense"))  # nothing is traced here: says nothing
    """
    global _warned
    if _warned or splitting.get() or ignoring.get() or _tracing_shapes.get():
        return
    if under_jit():
        _warned = True
        warnings.warn(
            f"{task} is traced outside mm.jit: it runs where its caller runs, unsplit (said once for all "
            "tasks). To have each task run on its devices, give the function to parallelize, or compile it "
            "with mmnnx.jit rather than jax.jit",
            stacklevel=3,
        )
