"""Contexts that set how functions are partitioned. They nest, and hold in the thread that opens them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

import mmnnx as mm
from mmnnx import ignore_transforms
from mmnnx.mpmd.place.options import fusing
from multimesh_compat.jax import constraints

_fast_path: ContextVar[bool] = ContextVar("multimesh_fast_path", default=True)
_loops_only: ContextVar[bool] = ContextVar("multimesh_fuse_loops_only", default=False)


def fast_path() -> bool:
    """Whether a function without tasks runs as `jax.jit` runs it."""
    return _fast_path.get()


@contextlib.contextmanager
def enable_fast_path(enable: bool = True, context_value: bool | None = None) -> Iterator[None]:
    """Whether a function without tasks is plain `jax.jit`, as it is by default, or goes through `mm.jit` too.

    Args:
      enable: whether it is.
      context_value: takes effect instead of `enable` where it is given. (The documents name it without an
        explanation.)

    Example:
      >>> with enable_fast_path(False):
      ...     y = step(x)
    """
    token = _fast_path.set(enable if context_value is None else context_value)
    try:
        yield
    finally:
        _fast_path.reset(token)


@contextlib.contextmanager
def enable_recomputation(enable: bool = True, context_value: bool | None = None) -> Iterator[None]:
    """Whether each task computes for itself what depends on the batch alone (`mm.enable_recomputation`).

    Switched off, such a value is computed once and sent.

    Args:
      enable: whether they do.
      context_value: takes effect instead of `enable` where it is given.

    Example:
      >>> with enable_recomputation(False):
      ...     loss = step(params, batch)
    """
    with mm.enable_recomputation(enable if context_value is None else context_value):
        yield


@contextlib.contextmanager
def enable_task_fusion(enable: bool = True) -> Iterator[None]:
    """Whether neighbouring tasks on one submesh become one program, or stay apart (the default).

    Example:
      >>> with enable_task_fusion():
      ...     loss = step(params, batch)
    """
    with mm.enable_task_fusion(enable, loops_only=_loops_only.get()):
        yield


@contextlib.contextmanager
def only_fuse_loop_tasks(enable: bool = True) -> Iterator[None]:
    """Limits `enable_task_fusion`, around it or inside, to microbatch loops.

    Example:
      >>> with enable_task_fusion(), only_fuse_loop_tasks():
      ...     loss = step(params, batch)
    """
    token = _loops_only.set(enable)
    try:
        with mm.enable_task_fusion(fusing.get() != "none", loops_only=enable):
            yield
    finally:
        _loops_only.reset(token)


_CONTEXTS: dict[str, Callable[[bool], AbstractContextManager[None]]] = {
    "autoshard": constraints.autoshard,
    "enable_recomputation": enable_recomputation,
    "enable_fast_path": enable_fast_path,
    "ignore_transforms": ignore_transforms,
    "enable_task_fusion": enable_task_fusion,
    "only_fuse_loop_tasks": only_fuse_loop_tasks,
}


@contextlib.contextmanager
def context(
    autoshard: bool | None = None,
    enable_recomputation: bool | None = None,
    enable_fast_path: bool | None = None,
    ignore_transforms: bool | None = None,
    enable_task_fusion: bool | None = None,
    only_fuse_loop_tasks: bool | None = None,
) -> Iterator[None]:
    """Several contexts in one: each is opened with the value given; None leaves it as it is outside.

    Args:
      autoshard, enable_recomputation, enable_fast_path, ignore_transforms, enable_task_fusion,
        only_fuse_loop_tasks: the first argument of the context of that name.

    Example:
      >>> with context(enable_recomputation=False, enable_fast_path=False):
      ...     loss = step(params, batch)
    """
    given = dict(locals())
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            if value is not None:
                stack.enter_context(_CONTEXTS[name](value))
        yield
