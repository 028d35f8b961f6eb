"""What `mjit` and `parallelize` return: a compiled function under the defaults of multimesh.jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

import mmnnx as mm
from multimesh_compat.jax.contexts import default_contexts


def mjit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`mmnnx.jit`, which splits a function over the submeshes of its tasks, for what was `jax.jit`.

    Args:
      fun: the function; without it, a decorator is returned.
      **options: those of `mmnnx.jit`, which has most of those of `jax.jit`.

    Returns:
      A function with the methods of a `mmnnx.jit`. Neighbouring tasks on one submesh are fused, unless
      `enable_task_fusion(False)`.

    Raises:
      TypeError: as `mmnnx.jit` does.

    Example:
      >>> step = mjit(lambda w, x: columns(w[1], rows(w[0], x)), donate_argnums=0)
    """
    if fun is None:
        return functools.partial(mjit, **options)
    return Jitted(fun, mm.jit(fun, **options))


class Jitted:
    """A function made by `mjit`: what `mmnnx.jit` made, called in `default_contexts`."""

    def __init__(self, fun: Callable[..., Any], jitted: Any):
        functools.update_wrapper(self, fun, updated=())
        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with default_contexts():
            return self._jitted(*args, **kwargs)

    def __get__(self, obj: Any, objtype: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._jitted, name)

        @functools.wraps(method)
        def in_contexts(*args: Any, **kwargs: Any) -> Any:
            with default_contexts():
                return method(*args, **kwargs)

        return in_contexts


_OF_COMPILED = {name for name in dir(jax.stages.Compiled) if not name.startswith("_")} | {"input_layouts"}


class Parallelized(Jitted):
    """A function made by `parallelize`: what `jax.stages.Compiled` has, it has, for operands like these."""

    def __init__(self, fun: Callable[..., Any], jitted: Any, operands: Sequence[jax.ShapeDtypeStruct]):
        super().__init__(fun, jitted)
        self._operands = operands

    @functools.cached_property
    def _compiled(self) -> Any:
        return self.lower(*self._operands).compile()

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_COMPILED:
            return super().__getattr__(name)
        found = getattr(self._compiled, name)
        if name.startswith("out") and not isinstance(self._compiled, jax.stages.Compiled):
            # Of NNX, which has the new values of arguments and keywords before the result.
            return (found.children() if name == "out_tree" else found)[2]
        return found
