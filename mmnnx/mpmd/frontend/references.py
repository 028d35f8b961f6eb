"""References (`jax.new_ref`) that a function closes over, and Variables that `mm.jit` does not take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat


def captured_reference(jaxpr: Any) -> str | None:
    """Why a function that closes over a reference cannot be partitioned; None if it does not."""
    for _, value in _compat.open_jaxpr(jaxpr)[3]:
        if isinstance(value, jax.Ref):
            held = _compat.held(value).aval.str_short()
            return f"closes over a jax.new_ref of {held}, and not all is in one place: pass it as an argument"
    return None


@contextlib.contextmanager
def hijax_refused(trees: tuple) -> Iterator[None]:
    """Says of hijax Variables in (args, kwargs) that `mm.jit` takes none, in the place of what fails of them.

    Raises:
      ValueError: names the first of them.
    """
    try:
        yield
    except Exception as error:
        for path, x in nnx.iter_graph(trees):
            if isinstance(x, nnx.Variable) and x.hijax:
                raise ValueError(
                    f"{'.'.join(map(str, path[1:]))} is a hijax Variable: mm.jit takes ordinary ones, "
                    "or ref=True where a function is to change them in place. Make it with hijax=False"
                ) from error
        raise
