"""A traced function as all stages know it: over arrays alone, on meshes with Auto axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.explicit_axes import (
    has_explicit_axes,
    result_shardings,
    unreduced_result,
    with_auto_axes,
)
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.frontend.references import captured_reference


@dataclasses.dataclass(frozen=True, eq=False)
class OverArrays:
    """A traced function.

    Attributes:
      fun_name, jaxpr: as in `jax.stages.Traced`; what references hold in the end are the last results.
      donated: whether each argument is; what a reference holds is.
      result_shardings: the sharding that the type of each result had, over an abstract mesh, if any.
      typed: whether it was traced with shardings in types.
      only_as_it_is: why it cannot be partitioned, if it cannot.
    """

    fun_name: str
    jaxpr: Any
    donated: list[bool]
    result_shardings: list[NamedSharding | None]
    typed: bool
    only_as_it_is: str | None

    def check(self) -> None:
        """Refuses a function that is to be partitioned and cannot be.

        Raises:
          ValueError: says why.
        """
        if self.only_as_it_is is not None:
            raise ValueError(f"{self.fun_name} {self.only_as_it_is}")


def over_arrays(traced: jax.stages.Traced, record: Record) -> tuple[OverArrays, Record]:
    """The function that JAX traced, and what is known of its arguments and results."""
    jaxpr, references = traced.jaxpr, record.references
    donated = [info.donated or n in references for n, info in enumerate(jax.tree.leaves(traced.args_info))]
    why_not = captured_reference(jaxpr)
    if why_not is None and (references or _compat.makes_references(jaxpr)):
        jaxpr = _compat.without_references(jaxpr)
        record = dataclasses.replace(record, results=[*record.results, *references.values()])
    shardings, typed = result_shardings(jaxpr), has_explicit_axes(jaxpr)
    if why_not is None and typed:
        why_not = unreduced_result(jaxpr)
        jaxpr = with_auto_axes(jaxpr)
    return OverArrays(traced.fun_name, jaxpr, donated, shardings, typed, why_not), record
