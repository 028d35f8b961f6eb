"""From a bound program to what runs it: compiled, with arguments brought in and results handed out."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.compile.compile_program import compile_program, compiled_text
from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.distributed.agreement import check_same_program
from mmnnx.mpmd.distributed.processes import is_described
from mmnnx.mpmd.ir.equations import is_var
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.runtime.arguments import InputBindings, bind_inputs, binder, place_constant
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.dispatch import runner
from mmnnx.mpmd.runtime.donated_arguments import DonatedArguments
from mmnnx.mpmd.runtime.profile import is_measured, measurer
from mmnnx.mpmd.runtime.put import own_copy
from mmnnx.mpmd.runtime.results import Delivery, deliver_results

Run = Callable[[Sequence[Any]], list[Any]]

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
        described = [d for mesh in bound.program.names for d in mesh.devices.flat if is_described(d)]
        if described:
            raise ValueError(
                f"{bound.name} is placed on devices that are only described ({described[0].device_kind}). "
                "Its program can be looked at; to call it, place it on devices that are here"
            )
        return Prepared(bound, constants, bindings, deliveries, donated, options)

    return prepare


class Prepared:
    """A compiled program, as a function from flat arguments to flat results.

    Attributes:
      compiled: what was compiled.
      bound: what it was compiled of.
    """

    def __init__(
        self,
        bound: BoundProgram,
        constants: Sequence[Any],
        bindings: InputBindings,
        deliveries: list[Delivery],
        donated: DonatedArguments,
        options: CompilerOptions,
    ):
        program = bound.program
        number = check_same_program(lambda: _in_full(program), bound.name)
        rewritten = rewrite(program)
        added = list(rewritten.program.inputs.values())[len(program.inputs) :]  # where keys are read
        key_shardings = [NamedSharding(mesh, PartitionSpec()) for _, mesh in added]
        fixed = bound.fixed | dict(zip(added, key_shardings))
        compiled = compile_program(rewritten.program, fixed, bindings.overwritable, number, options)
        bound.dump.write("compile", lambda _: compiled_text(compiled))
        self.compiled, self.bound = compiled, bound
        self._execute = runner(compiled, bound.name, rewritten.numbers, number)
        self._bindings, self._deliveries, self._donated = bindings.sources, deliveries, donated
        returned = {v for v in bound.flat.outvars if is_var(v)}
        given = (own_copy(c) if v in returned else c for (v, _), c in zip(bound.flat.constants, constants))
        self._constants = [*given, *(place() for place in bindings.placed_constants)]
        self._keys = [place_constant(key, binder(key, s)) for key, s in zip(rewritten.keys, key_shardings)]

        @functools.cache
        def as_printed() -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
            """What runs the program as it prints, and measures it."""
            if rewritten.program.instructions == program.instructions:
                return measurer(compiled)
            return measurer(compile_program(program, bound.fixed, bindings.overwritable, 0, options))

        self._as_printed = as_printed

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        self._donated.check(leaves)
        values = [*leaves, *self._constants]
        arrays = [values[n] if bind is None else bind(values[n]) for n, bind in self._bindings]
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
        results = [deliver(values, placed) for deliver, placed in zip(self._deliveries, made)]
        self._donated.delete(leaves)
        return results


def _in_full(program: Program) -> str:
    """A program with what its fragments compute, as text that is the same in every process."""
    text = "\n".join([str(program), *(f"{f.name}: {f.jaxpr}" for f in program.fragments)])
    return re.sub(r"0x[0-9a-f]+", "0x", text)
