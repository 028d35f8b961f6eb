"""From a bound program to what runs it: compiled, with arguments brought in and results handed out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.compile.compile_program import Compiled, compile_program, compiled_text
from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.distributed.agreement import check_same_program, check_same_values
from mmnnx.mpmd.distributed.processes import is_described
from mmnnx.mpmd.ir.equations import Atom, Var, is_var
from mmnnx.mpmd.ir.printing import value_text
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.runtime.arguments import InputBindings, bind_inputs, binder, place_constant
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.dispatch import runner
from mmnnx.mpmd.runtime.donated_arguments import DonatedArguments
from mmnnx.mpmd.runtime.pick import picker
from mmnnx.mpmd.runtime.profile import is_measured, measurer
from mmnnx.mpmd.runtime.put import own_copy
from mmnnx.mpmd.runtime.results import Delivery, as_made, deliver_results, result_shardings

Run = Callable[[Sequence[Any]], list[Any]]
Execute = Callable[[list[jax.Array]], Sequence[jax.Array]]  # from inputs to what holds the results, in a row

_SUB_BYTE = {"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"}

OUTERMOST = (
    "A function of mm.jit is part of what is around it, here a transformation or another jit that is not "
    "divided. Put mm.jit around all of it: mm.jit(nnx.grad(f)), not nnx.grad(mm.jit(f))"
)


def preparer(bound: BoundProgram, leaves: Sequence[Any]) -> Callable[..., Prepared]:
    """What compiles a program with options for XLA, and returns the function from flat arguments to results.

    Args:
      bound: the program.
      leaves: arguments like those that it will be called with.
    """
    # What becomes of an array after the function has closed over it changes nothing here.
    constants = [np.array(c) if isinstance(c, np.ndarray) else c for _, c in bound.flat.constants]
    bindings = bind_inputs(bound, leaves, constants)
    deliveries, donated = deliver_results(bound), DonatedArguments(bound, leaves)

    @gc_paused()
    def prepare(options: CompilerOptions = ()) -> Prepared:
        program = bound.program
        _check_widths(bound)
        number = check_same_program(lambda: _in_full(program, constants), bound.name)
        rewritten = rewrite(program)
        added = list(rewritten.program.inputs.values())[len(program.inputs) :]  # where keys are read
        key_shardings = [NamedSharding(mesh, PartitionSpec()) for _, mesh in added]
        fixed = bound.fixed | dict(zip(added, key_shardings))
        compiled = compile_program(rewritten.program, fixed, bindings.overwritable, number, options)
        bound.dump.write("compile", lambda _: compiled_text(compiled))
        if is_described_program(program):
            return Prepared(bound, compiled, lambda leaves: refuse_described(bound.name, program))
        keys = [place_constant(key, binder(key, s)) for key, s in zip(rewritten.keys, key_shardings)]
        execute = runner(compiled, bound.name, rewritten.numbers, number)
        as_printed = functools.cache(lambda: _measured(bound, bindings, compiled, options))
        return Prepared(
            bound,
            compiled,
            _Run(bound, number, constants, bindings, deliveries, donated, keys, execute, as_printed),
        )

    return prepare


@dataclasses.dataclass(frozen=True)
class Interface:
    """What a caller sees of the arguments and results of a compiled program, in flat order.

    Attributes:
      next_shardings: as in `BoundProgram`.
      arguments, results: the variable of each in the program; None for one that is in pieces there.
      result_shardings: where each result is; None for anywhere.
    """

    next_shardings: Mapping[int, NamedSharding]
    arguments: Sequence[Var | None]
    results: Sequence[Atom | None]
    result_shardings: Sequence[Sharding | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A compiled program, as a function from flat arguments to flat results.

    Attributes:
      bound: what it was compiled of.
      compiled: what was compiled.
      run: the function.
    """

    bound: BoundProgram
    compiled: Compiled
    run: Run

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        return self.run(leaves)

    @property
    def interface(self) -> Interface:
        """What a caller sees of it."""
        bound = self.bound
        found = result_shardings(bound, self.compiled.shardings)
        return Interface(bound.next_shardings, bound.flat.invars, bound.flat.outvars, found)


def is_described_program(program: Program) -> bool:
    """Whether a program is placed on devices that are only described, and cannot run there."""
    return any(is_described(d) for mesh in program.names for d in mesh.devices.flat)


def refuse_described(name: str, program: Program) -> NoReturn:
    """Says why a function cannot be called that is placed on devices that are only described.

    Raises:
      ValueError: always.
    """
    kind = next(iter(program.names)).devices.flat[0].device_kind
    raise ValueError(
        f"{name} is placed on devices that are only described ({kind}). Its program can be looked at, "
        "compiled and planned (mm.plan); to call it, place it on devices that are here"
    )


class _Run:
    """Runs a compiled program: brings arguments in, executes, hands results out."""

    def __init__(
        self,
        bound: BoundProgram,
        number: int,
        constants: Sequence[Any],
        bindings: InputBindings,
        deliveries: list[Delivery],
        donated: DonatedArguments,
        keys: list[jax.Array],
        execute: Execute,
        as_printed: Callable[[], Execute],
    ):
        self._donated = donated
        self._pick = picker([n for n, _ in bindings.sources])
        self._binds = [(n, bind) for n, (_, bind) in enumerate(bindings.sources) if bind is not None]
        starts = itertools.accumulate((len(held) for held in bound.results), initial=0)
        spans = itertools.pairwise(starts)
        self._deliveries = [(None if d is as_made else d, *span) for d, span in zip(deliveries, spans)]
        self._execute, self._as_printed, self._keys = execute, as_printed, keys
        returned = {v for v in bound.flat.outvars if is_var(v)}
        given = (own_copy(c) if v in returned else c for (v, _), c in zip(bound.flat.constants, constants))
        self._constants = [*given, *(place() for place in bindings.placed_constants)]

        self._check: Callable[[Sequence[Any]], None] | None = None
        if jax.process_count() > 1:
            self._check = lambda leaves: check_same_values(
                number, _own_copies(bound, leaves, constants), bound.name
            )

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        self._donated.check(leaves)
        if self._check is not None:
            self._check(leaves)
            self._check = None  # of the first call alone, as it reads values
        values = [*leaves, *self._constants]
        arrays = [*self._pick(values)]
        for n, bind in self._binds:
            arrays[n] = bind(arrays[n])
        try:
            with _compat.asked_transfers():
                if is_measured():
                    made = self._as_printed()(arrays)
                else:
                    arrays += self._keys
                    made = self._execute(arrays)
        except TypeError as error:
            if "Cannot apply JAX transformations" in str(error):
                error.add_note(OUTERMOST)
            raise
        results = [
            made[start] if deliver is None else deliver(values, made[start:end])
            for deliver, start, end in self._deliveries
        ]
        self._donated.delete(leaves)
        return results


def _measured(
    bound: BoundProgram, bindings: InputBindings, compiled: Compiled, options: CompilerOptions
) -> Execute:
    """What runs the program as it prints, and measures it."""
    if compiled.program.instructions == bound.program.instructions:
        return measurer(compiled)
    return measurer(compile_program(bound.program, bound.fixed, bindings.overwritable, 0, options))


def _check_widths(bound: BoundProgram) -> None:
    """Raises ValueError for what a mesh cannot be given yet."""
    program = bound.program
    if _compat.compiled_takes_sub_byte_types():
        return
    for call in program.calls:
        for buffer in call.inputs:
            if program.values[buffer][0].aval.dtype.name in _SUB_BYTE:
                raise ValueError(
                    f"{bound.name}: {call.name!r} reads {value_text(program, buffer)}: on "
                    "submeshes, types of less than a byte need JAX 0.12. Keep it as int8"
                )


def _in_full(program: Program, constants: Sequence[Any]) -> str:
    """A program, what its fragments compute and where its constants are: the same text in every process."""
    fragments = [f"{f.name}: {f.jaxpr}" for f in program.fragments]
    placed = [
        f"closed-over constant {jax.typeof(c).str_short()} on devices {sorted(d.id for d in c.devices())}"
        for c in constants
        if is_committed(c)
    ]
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join([str(program), *fragments, *placed]))


def _own_copies(
    bound: BoundProgram, leaves: Sequence[Any], constants: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
    """The values of which each process has a copy of its own: what each is, in words, and the value."""
    for leaf, own, x in zip(bound.record.inputs, bound.in_shardings, leaves):
        if own is None:
            yield f"argument {leaf}", x
    for x in constants:
        if not is_committed(x):
            yield f"the closed-over constant {jax.typeof(x).str_short()}", x
