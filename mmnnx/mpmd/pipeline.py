"""From a traced function and its arguments to something that runs: the stages, put together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.compile.input_shardings import deriver
from mmnnx.mpmd.divide.divide import divide, divides_inputs
from mmnnx.mpmd.emit.emit import emit
from mmnnx.mpmd.frontend.function import Function, check_device, enter
from mmnnx.mpmd.frontend.over_arrays import OverArrays
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.hoist.hoist import hoist
from mmnnx.mpmd.inline.calls import inline
from mmnnx.mpmd.ir.dump import Dump
from mmnnx.mpmd.ir.equations import scopes_in
from mmnnx.mpmd.ir.pieces import PieceMap
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.partition.partition import Partition, one_fragment, partitions
from mmnnx.mpmd.partition.timetable import fits
from mmnnx.mpmd.place.logical_shard_maps import divide_shard_maps
from mmnnx.mpmd.place.options import fusing
from mmnnx.mpmd.place.place import place
from mmnnx.mpmd.runtime.as_is import runs_as_it_is
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.counters import next_shardings, out_shardings
from mmnnx.mpmd.runtime.pieces import AroundPieces, around_pieces
from mmnnx.mpmd.runtime.prepare import Prepared, is_described_program, preparer
from mmnnx.mpmd.runtime.references import AroundReferences, around_references
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.placement import PlacementError


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A function that was split for arguments that live in certain places.

    Attributes:
      program: what a call runs.
      prepare: compiles it with options for XLA, once for each, and returns the function from flat arguments
        to flat results; None where everything is on one TaskMesh already and the function can run as it is.
      input_shardings: derives where each flat argument would best live.
      next_shardings: for some unplaced arguments, by their number, the sharding in which a call leaves their
        new value. The next call may be given that value.
      is_described: whether its devices are only described, so that it can be compiled but not called.
    """

    program: Program
    prepare: Callable[[CompilerOptions], Prepared | AroundPieces | AroundReferences] | None
    input_shardings: Callable[[], list[NamedSharding]]
    next_shardings: dict[int, NamedSharding] = dataclasses.field(default_factory=dict)
    is_described: bool = False


def split(
    traced: OverArrays,
    record: Record,
    leaves: Sequence[Any],
    multimesh: MultiMesh | None,
    device: jax.Device | None,
) -> Split:
    """Splits a function, whose tasks are registered, for arguments that live where `leaves` do.

    Args:
      device: the one that it was told to run on, if any.

    Raises:
      PlacementError, ValueError: as `mm.jit` does.
      VerificationError: if the program does not hold together.
    """
    dump = Dump.of(traced.fun_name)
    given = traced, record, [_compat.held(x) for x in leaves], multimesh, dump
    whole = enter(*given)
    try:
        function, pieces = divide(whole)
    except PlacementError:
        if not divides_inputs(whole):
            raise
        whole = enter(*given, inputs_in_pieces=False)  # perhaps it was a batch
        function, pieces = divide(whole)
    mesh = _mesh_of_all(function)
    if mesh is None:
        function.traced.check()
        flat = inline(function)
        placed = divide_shard_maps(function, place(function, flat, fits))
        hoisted = hoist(function, placed)
        partition, program = emit(function, partitions(function, hoisted))
    else:
        partition, program = emit(function, [one_fragment(function, mesh)])
    found = _runnable(function, partition, program, mesh, device)
    return _for_callers(found, whole, pieces)


def _mesh_of_all(function: Function) -> Mesh | None:
    """The mesh on which a function runs as one fragment: the only one that it touches, unless it has several
    tasks there and they are to stay apart: `mm.enable_task_fusion(False)` was said, not only left at that.
    """
    scopes = scopes_in(function.jaxpr) if fusing.get() == "none" else ()
    tasks = {found[0] for scope in scopes if (found := function.task_of(scope)) is not None}
    return function.only_mesh if len(tasks) < 2 else None


def _runnable(
    function: Function, partition: Partition, program: Program, mesh: Mesh | None, device: jax.Device | None
) -> Split:
    """What compiles and runs a program; the function itself, where JAX alone does what is asked."""
    derive = deriver(function, partition, program)
    if mesh is not None and runs_as_it_is(function, partition.flat, mesh):
        return Split(program, None, derive)
    check_device(function, device)
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
    return Split(program, prepare, derive, later, is_described_program(program))


def _for_callers(split: Split, function: Function, pieces: PieceMap | None) -> Split:
    """What was split, for the arguments and results that the function has for its callers.

    Args:
      split: made of a function over arrays, or over their pieces.
      function: the one over whole arrays.
      pieces: what was divided, if anything.
    """
    prepare: Any = split.prepare
    if prepare is None:
        return split
    if pieces is not None:
        prepare = around_pieces(prepare, pieces, function.record.names())
        split = dataclasses.replace(
            split,
            input_shardings=functools.partial(_of_whole_arrays, split.input_shardings, pieces),
            next_shardings=pieces.by_argument(split.next_shardings),
        )
    if function.record.references:
        prepare = around_references(prepare, function.record)
    return dataclasses.replace(split, prepare=functools.cache(prepare))


def _of_whole_arrays(derive: Callable[[], list[NamedSharding]], pieces: PieceMap) -> list[NamedSharding]:
    return pieces.of_arguments(derive(), lambda _, divided: divided.whole)
