"""Functions over references (`jax.new_ref`): they become functions over arrays.

A reference is state. What it holds is an argument, and what it holds in the end is one more result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.frontend.record import Record


@dataclasses.dataclass(frozen=True, eq=False)
class OverArrays:
    """A traced function over arrays alone: what is read of a `jax.stages.Traced`.

    Attributes:
      fun_name, jaxpr, args_info: as there. What references held is donated.
    """

    fun_name: str
    jaxpr: Any
    args_info: list[Any]


def over_arrays(traced: jax.stages.Traced, record: Record) -> tuple[Any, Record]:
    """A traced function without references, and what is known of its arguments and results.

    One that closes over a reference stays as it is.
    """
    has_some = record.references or _compat.makes_references(traced.jaxpr)
    if not has_some or _captured(traced):
        return traced, record
    args_info = [
        dataclasses.replace(info, donated=info.donated or n in record.references)
        for n, info in enumerate(jax.tree.leaves(traced.args_info))
    ]
    results = [*record.results, *record.references.values()]
    jaxpr = _compat.without_references(traced.jaxpr)
    return OverArrays(traced.fun_name, jaxpr, args_info), dataclasses.replace(record, results=results)


def check_captured(traced: Any) -> None:
    """Refuses a function that closes over a reference.

    Raises:
      ValueError: names the function, and what the reference holds.
    """
    for reference in _captured(traced):
        raise ValueError(
            f"{traced.fun_name} closes over a jax.new_ref of {_compat.held(reference).aval.str_short()}, "
            "which mm.jit takes only where all is in one place: pass it as an argument"
        )


def _captured(traced: Any) -> list[jax.Ref]:
    """The references that a traced function closes over."""
    return [c for _, c in _compat.open_jaxpr(traced.jaxpr)[3] if isinstance(c, jax.Ref)]


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
