"""From a traced function and its arguments to something that runs: the stages, put together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.compile.input_shardings import deriver
from mmnnx.mpmd.emit.emit import emit
from mmnnx.mpmd.frontend.function import Function, enter
from mmnnx.mpmd.frontend.over_arrays import over_arrays
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.hoist.hoist import hoist
from mmnnx.mpmd.inline.calls import inline
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.partition.partition import Partition, one_fragment, partitions
from mmnnx.mpmd.partition.timetable import fits
from mmnnx.mpmd.place.place import place
from mmnnx.mpmd.runtime.as_is import runs_as_it_is
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.counters import next_shardings, out_shardings
from mmnnx.mpmd.runtime.prepare import Run, preparer
from mmnnx.mpmd.runtime.references import around
from mmnnx.sharding.mesh import MultiMesh


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A function that was split for arguments that live in certain places.

    Attributes:
      program: what a call runs.
      prepare: compiles it, once, and returns the function from flat arguments to flat results; None where
        everything is on one TaskMesh already and the function can run as it is.
      input_shardings: derives where each flat argument would best live.
      next_shardings: for some unplaced arguments, by their number, the sharding in which a call leaves their
        new value. The next call may be given that value.
    """

    program: Program
    prepare: Callable[[], Run] | None
    input_shardings: Callable[[], list[NamedSharding]]
    next_shardings: dict[int, NamedSharding] = dataclasses.field(default_factory=dict)


def split(
    traced: jax.stages.Traced, record: Record, leaves: Sequence[Any], multimesh: MultiMesh | None
) -> Split:
    """Splits a traced function for arguments that live where `leaves` do.

    Raises:
      PlacementError, ValueError: as `mm.jit` does.
      VerificationError: if the program does not hold together.
    """
    function = enter(*over_arrays(traced, record), [_compat.held(x) for x in leaves], multimesh)
    if function.only_mesh is None:
        function.traced.check()
        flat = inline(function)
        placed = place(function, flat, fits)
        hoisted = hoist(function, placed)
        partition, program = emit(function, partitions(function, hoisted))
    else:
        partition, program = emit(function, [one_fragment(function, function.only_mesh)])
    return _runnable(function, partition, program)


def _runnable(function: Function, partition: Partition, program: Program) -> Split:
    """What compiles and runs a program; the function itself, where JAX alone does what is asked."""
    mesh = function.only_mesh
    derive = deriver(function, partition, program)
    if mesh is not None and runs_as_it_is(function, partition.flat, mesh):
        return Split(program, None, derive)
    function.traced.check()
    results = out_shardings(function, partition)
    later = next_shardings(function, partition, results)
    bound = BoundProgram(
        program=program,
        flat=partition.flat,
        fixed=partition.fixed,
        in_shardings=function.shardings.in_shardings,
        next_shardings=later,
        out_shardings=results,
        results=partition.results,
        record=function.record,
        traced=function.traced,
        multimesh=function.multimesh,
        explicit=function.meshes.explicit,
        dump=function.dump,
    )
    prepare = preparer(bound, function.leaves)
    if references := function.record.references:
        prepare = around(prepare, references, function.record.names())
    return Split(program, functools.cache(prepare), derive, later)
