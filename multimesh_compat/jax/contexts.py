"""Contexts that set how functions are partitioned. They nest, and hold in the thread that opens them.

Of each, `context_value` takes effect instead of the first argument where it is given; None, for either,
leaves things as they are around. (The documents name `context_value` for two, without an explanation.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import EllipsisType

import mmnnx as mm
from mmnnx.mpmd.place.options import fusing
from multimesh_compat.jax.constraints import logical_names

_fast_path: ContextVar[bool] = ContextVar("multimesh_fast_path", default=True)
_loops_only: ContextVar[bool] = ContextVar("multimesh_fuse_loops_only", default=False)


def fast_path() -> bool:
    """Whether a function without tasks runs as `jax.jit` runs it."""
    return _fast_path.get()


def default_contexts() -> AbstractContextManager[None]:
    """What holds where nothing else was said: neighbouring tasks on one submesh are fused."""
    return _fuse(True) if fusing.get() == "unsaid" else contextlib.nullcontext()


@contextlib.contextmanager
def autoshard(
    autoshard: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Whether names in sharding constraints are logical: then names without a mesh axis mean replication.

    Without this context they are logical inside tasks and in functions given to `parallelize`, nowhere else.

    Example:
      >>> from jax.sharding import Mesh, NamedSharding
      >>> on_two = NamedSharding(Mesh(jax.devices()[:2], ("x",)), P("x"))
      >>> with autoshard(False):
      ...     y = with_sharding_constraint(jnp.ones(4), on_two)  # as jax.lax.with_sharding_constraint
    """
    with _opened(logical_names, autoshard, context_value):
        yield


@contextlib.contextmanager
def enable_fast_path(
    enable: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Whether a function without tasks is plain `jax.jit`, as it is by default, or goes through `mm.jit` too.

    Example:
      >>> with enable_fast_path(False):
      ...     double, init, data = parallelize(lambda w, x: w * x, lambda: jnp.ones(2), lambda: jnp.ones(2))
      ...     y = double(init(), data())
    """
    with _opened(lambda value: _set(_fast_path, value), enable, context_value):
        yield


@contextlib.contextmanager
def enable_recomputation(
    enable: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Whether each task computes for itself what depends on the batch alone (`mm.enable_recomputation`).

    Switched off, such a value is computed once and sent.

    Example:
      >>> with enable_recomputation(False):
      ...     y = mjit(lambda w, x: w * x)(2.0, 3.0)
    """
    with _opened(mm.enable_recomputation, enable, context_value):
        yield


@contextlib.contextmanager
def ignore_transforms(
    ignore: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Whether everything is plain JAX on one device, for debugging (`mm.ignore_transforms`).

    Example:
      >>> with ignore_transforms():
      ...     y = mjit(lambda w, x: w * x)(2.0, 3.0)
    """
    with _opened(mm.ignore_transforms, ignore, context_value):
        yield


@contextlib.contextmanager
def enable_task_fusion(
    enable: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Whether neighbouring tasks on one submesh become one program, or stay apart.

    By default they do in what `parallelize`, `parallelize_step` and `mjit` return.

    Example:
      >>> with enable_task_fusion(False):
      ...     y = mjit(lambda w, x: w * x)(2.0, 3.0)
    """
    with _opened(_fuse, enable, context_value):
        yield


@contextlib.contextmanager
def only_fuse_loop_tasks(
    enable: bool | None = True, context_value: bool | EllipsisType | None = ...
) -> Iterator[None]:
    """Limits the fusion of tasks, which `enable_task_fusion` is about, to microbatch loops.

    Example:
      >>> with only_fuse_loop_tasks():
      ...     y = mjit(lambda w, x: w * x)(2.0, 3.0)
    """

    @contextlib.contextmanager
    def limited(value: bool) -> Iterator[None]:
        with _set(_loops_only, value), _fuse(fusing.get() != "none"):
            yield

    with _opened(limited, enable, context_value):
        yield


def _opened(
    open: Callable[[bool], AbstractContextManager[None]],
    value: bool | None,
    context_value: bool | EllipsisType | None,
) -> AbstractContextManager[None]:
    value = value if isinstance(context_value, EllipsisType) else context_value
    return contextlib.nullcontext() if value is None else open(value)


def _fuse(enable: bool) -> AbstractContextManager[None]:
    return mm.enable_task_fusion(enable, loops_only=_loops_only.get())


@contextlib.contextmanager
def _set(var: ContextVar[bool], value: bool) -> Iterator[None]:
    token = var.set(value)
    try:
        yield
    finally:
        var.reset(token)


_CONTEXTS: dict[str, Callable[[bool | None], AbstractContextManager[None]]] = {
    "autoshard": autoshard,
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
      autoshard: the first argument of the context `autoshard`; and so is each other that of the context of
        its name.

    Example:
      >>> with context(enable_recomputation=False, enable_fast_path=False):
      ...     y = mjit(lambda w, x: w * x)(2.0, 3.0)
    """
    given = dict(locals())
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            stack.enter_context(_CONTEXTS[name](value))
        yield
