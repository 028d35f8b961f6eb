"""From a program to what runs it: compiled, and tied to the arguments and results of the function."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.compile.compile_program import compile_program
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.distributed.agreement import check_same_program
from mmnnx.mpmd.frontend.observe import Record
from mmnnx.mpmd.ir.equations import Flat, Var, is_var
from mmnnx.mpmd.ir.fragments import PlacedVar
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import entering
from mmnnx.mpmd.runtime.arguments import (
    Bind,
    Delivery,
    binder,
    check_shared,
    copied,
    deliver,
    own_copy,
    settling,
    weakly_typed,
)
from mmnnx.mpmd.runtime.dispatch import measurer, runner
from mmnnx.mpmd.runtime.profile import is_measured
from mmnnx.sharding.mesh import MultiMesh

Run = Callable[[Sequence[Any]], list[Any]]

OUTERMOST = (
    "A function of mm.jit is part of what is around it, here a transformation or another jit that is not "
    "divided. Put mm.jit around all of it: mm.jit(nnx.grad(f)), not nnx.grad(mm.jit(f))"
)


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """A program, and what ties it to the function that it is of.

    Attributes:
      program: the program.
      flat: the equations that it was made of.
      fixed: shardings that are decided; those of inputs are added.
      given: for each argument, the sharding that it has or is given; None if it lives nowhere in particular.
      settled: for some of those that do not, where their next values will be: both are taken.
      asked: for each result, the sharding that it must have; None for one that stays where it is computed.
      held: for each result, the values of the program that hold it; none for an argument or a constant.
      record, traced: what the trace showed.
      multimesh: whose devices values that are held on every mesh are spread over.
    """

    program: Program
    flat: Flat
    fixed: dict[PlacedVar, NamedSharding]
    given: Sequence[NamedSharding | None]
    settled: Mapping[int, NamedSharding]
    asked: Sequence[NamedSharding | None]
    held: Sequence[Sequence[PlacedVar]]
    record: Record
    traced: jax.stages.Traced
    multimesh: MultiMesh | None

    @property
    def donates(self) -> list[bool]:
        """Whether each argument is donated."""
        return [a.donated for a in jax.tree.leaves(self.traced.args_info)]

    @property
    def number(self) -> dict[Var, int]:
        """Of each argument and constant, in this order."""
        return {v: n for n, v in enumerate((*self.flat.invars, *(v for v, _ in self.flat.constants)))}


def preparer(tied: BoundProgram, leaves: Sequence[Any]) -> Callable[[], Run]:
    """What compiles a program and ties it to the arguments and results of the function.

    Args:
      tied: the program.
      leaves: arguments like those that it will be called with.
    """
    program, flat, name = tied.program, tied.flat, tied.traced.fun_name
    # What becomes of an array after the function has closed over it changes nothing here.
    constants = [np.array(c) if isinstance(c, np.ndarray) else c for _, c in flat.constants]
    bindings, placing, overwritten = _bindings(tied, [*leaves, *constants], len(leaves))
    deliveries = _deliveries(tied)
    returned = {v for v in flat.outvars if is_var(v)}
    donates, names = tied.donates, tied.record.names()
    # An array of which this process has nothing is one object for all calls, and cannot be used up.
    arrays = [(n, x) for n, x in enumerate(leaves) if isinstance(x, jax.Array)]
    away = {n for n, x in arrays if not x.sharding.addressable_devices}
    gone = [n for n, d in enumerate(donates) if d and flat.invars[n] not in returned and n not in away]

    @gc_paused()
    def prepare() -> Run:
        number = check_same_program(lambda: _in_full(program), name)
        rewritten = rewrite(program)
        runs, numbers, keys = rewritten.program, rewritten.numbers, rewritten.keys
        added = list(runs.inputs.values())[len(program.inputs) :]
        targets = {held: NamedSharding(held[1], PartitionSpec()) for held in added}
        compiled = compile_program(runs, tied.fixed | targets, overwritten, number)
        execute = runner(compiled, name, numbers, number)
        given = (own_copy(c) if v in returned else c for (v, _), c in zip(flat.constants, constants))
        kept = [*given, *(place() for place in placing)]
        known = [_placed(key, binder(key, targets[held])) for key, held in zip(keys, added)]

        @functools.cache
        def apart() -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
            """What runs the program as it prints, and measures it."""
            as_printed = runs.instructions == program.instructions
            return measurer(compiled if as_printed else compile_program(program, tied.fixed, overwritten))

        def run(leaves: Sequence[Any]) -> list[Any]:
            if gone:
                check_shared(leaves, donates, names)
            for n, x in enumerate(leaves):
                if isinstance(x, jax.Array) and x.is_deleted():
                    raise ValueError(
                        f"{names[n]} was donated to an earlier call and is gone: "
                        "use the value that call returned, or do not donate it"
                    )
            values = [*leaves, *kept]
            arrays = [values[n] if bind is None else bind(values[n]) for n, bind in bindings]
            try:
                with _compat.asked_transfers():
                    if is_measured():
                        made = apart()(arrays)
                    else:
                        arrays += known
                        made = execute(arrays)
            except TypeError as error:
                if "Cannot apply JAX transformations" in str(error):
                    error.add_note(OUTERMOST)
                raise
            out = [give(values, held) for give, held in zip(deliveries, made)]
            for n in gone:
                if isinstance(leaves[n], jax.Array) and not leaves[n].is_deleted():
                    leaves[n].delete()
            return out

        return run

    return prepare


def _bindings(
    tied: BoundProgram, values: Sequence[Any], count: int
) -> tuple[list[tuple[int, Bind | None]], list[Callable[[], Any]], set[int]]:
    """How the inputs of the program come about.

    Args:
      tied: the program.
      values: arguments and constants.
      count: how many of them are arguments.

    Returns:
      For each input the number of a value and what is done to it; what makes more such values of constants,
      once, ahead of the first call; and the buffers of inputs whose arrays may be overwritten.
    """
    number, inputs, donates = tied.number, tied.program.inputs, tied.donates
    bindings: list[tuple[int, Bind | None]] = []
    placing: list[Callable[[], Any]] = []
    overwritten: set[int] = set()
    for buffer, (v, mesh) in inputs.items():
        n = number[v]
        own = tied.given[n] if n < count else None
        here = own if own is not None and own.mesh == mesh else entering(v.aval, mesh, own)
        target = tied.fixed.setdefault((v, mesh), here)
        later = tied.settled.get(n)
        bind = binder(values[n], target) if later is None else settling(values[n], later, target)
        if n >= count:
            bindings.append((len(values) + len(placing), None))
            placing.append(functools.partial(_placed, values[n], bind))
            continue
        bindings.append((n, bind))
        # Where it is used on a mesh with some of the same devices, that has its buffers there.
        here_too = [m for u, m in inputs.values() if u is v and m != mesh]
        alone = not any(set(mesh.devices.flat) & set(m.devices.flat) for m in here_too)
        if donates[n] and bind is None and alone and v not in tied.flat.outvars:
            overwritten.add(buffer)
    return bindings, placing, overwritten


def _deliveries(tied: BoundProgram) -> list[Delivery]:
    """How each result comes about."""
    number, outvars = tied.number, tied.flat.outvars
    deliveries: list[Delivery] = []
    used: set[Any] = set()
    types = tied.traced.jaxpr.out_avals
    for leaf, v, sharding, held, aval in zip(tied.record.results, outvars, tied.asked, tied.held, types):
        argument = number.get(v) if is_var(v) else None
        delivery = deliver(v, argument, sharding, held, tied.multimesh)
        # Two results, or a result and an argument that it is not the state of, never share a buffer.
        foreign = argument is not None and (leaf is None or leaf.updates != argument)
        delivery = copied(delivery) if foreign or (is_var(v) and v in used) else delivery
        deliveries.append(weakly_typed(delivery) if aval.weak_type else delivery)
        used.update([v] if is_var(v) else [])
    return deliveries


def _placed(x: Any, bind: Bind | None) -> Any:
    """A constant where it is read, in no buffer that somebody else may give away."""
    here = x if bind is None else bind(x)
    return own_copy(here) if isinstance(x, jax.Array) else here


def _in_full(program: Program) -> str:
    """A program with what its fragments compute, as text that is the same in every process."""
    text = "\n".join([str(program), *(f"{f.name}: {f.jaxpr}" for f in program.fragments)])
    return re.sub(r"0x[0-9a-f]+", "0x", text)
