"""Fragments become XLA executables: each once, in parallel where their shardings are known.

What crosses between fragments keeps the sharding that XLA gave it where it was made; what is carried around a
loop, returned, or sent to a mesh of another shape has one that is decided here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.fragments import Fragment, Held
from mmnnx.mpmd.meshes import transferred
from mmnnx.mpmd.processes import are_apart, hear_specs, is_here, tell_specs
from mmnnx.mpmd.program import Call, Program, Transfer
from mmnnx.mpmd.trace import Var


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled fragment.

    Attributes:
      call: takes the fragment's inputs and returns its results, in orders of its own.
      inputs, outputs: which input (result) of the fragment comes where in them.
    """

    call: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program with an executable for each fragment of this process, and a sharding for each slot."""

    program: Program
    executables: dict[Fragment, Executable]
    shardings: tuple[NamedSharding, ...]


def compile_program(
    program: Program, fixed: dict[Held, NamedSharding], donated: set[int], program_number: int = 0
) -> Compiled:
    """Compiles every fragment of a program that this process has devices for.

    Args:
      program: what to compile.
      fixed: shardings that are decided: of inputs, results and carries.
      donated: input slots whose arrays may be overwritten.
      program_number: by which several processes know the program (`Peers.agree`).
    """
    fixed = fixed | _replicated(program, fixed)
    shardings = {slot: fixed[held] for slot, held in program.inputs.items()}
    donations = _donations(program, fixed, donated)
    executables: dict[Fragment, Executable] = {}
    made: dict[Fragment, tuple[NamedSharding, ...]] = {}
    number = {f: n for n, f in enumerate(program.fragments)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while len(made) < len(program.fragments):
            ready = _propagate(program, made, shardings)
            lowered = {
                f: _lower(f, [shardings[s] for s in call.inputs], fixed, donations[f])
                for f, call in ready.items()
                if is_here(f.mesh)
            }
            for f, compiled in zip(lowered, pool.map(lambda low: low.compile(), lowered.values())):
                inputs, outputs = _orders(f, donations[f])
                executables[f] = Executable(compiled, inputs, outputs)
                results = jax.tree.leaves(compiled.output_shardings)
                specs = [results[outputs.index(n)].spec for n in range(len(outputs))]
                made[f] = tuple(NamedSharding(f.mesh, spec) for spec in specs)
                tell_specs(program_number, number[f], f.mesh, specs)
            for f in ready:
                if f not in lowered:
                    specs = hear_specs(program_number, number[f], f.mesh, len(f.outvars))
                    made[f] = tuple(NamedSharding(f.mesh, spec) for spec in specs)
    _propagate(program, made, shardings)
    return Compiled(program, executables, tuple(shardings[s] for s in range(len(program.values))))


def _same_shape(a: Mesh, b: Mesh) -> bool:
    return a.devices.shape == b.devices.shape


def _replicated(program: Program, fixed: dict[Held, NamedSharding]) -> dict[Held, NamedSharding]:
    """Values that go to a mesh of another shape, and all values of one-device meshes: one copy a device."""
    found: dict[Held, NamedSharding] = {}
    for held in program.values:
        if held[1].size == 1:
            found[held] = NamedSharding(held[1], PartitionSpec())
    for t in program.transfers:
        held = program.values[t.inputs[0]]
        if not _same_shape(t.source_mesh, t.target_mesh) and held not in fixed:
            found[held] = NamedSharding(t.source_mesh, PartitionSpec())
    return {held: s for held, s in found.items() if held not in fixed}


def _propagate(
    program: Program,
    made: dict[Fragment, tuple[NamedSharding, ...]],
    shardings: dict[int, NamedSharding],
) -> dict[Fragment, Call]:
    """Fills in the shardings that are known, and returns the fragments that can be compiled now."""
    ready: dict[Fragment, Call] = {}
    for i in program.instructions:
        if isinstance(i, Transfer):
            source = shardings.get(i.inputs[0])
            if source is None or i.outputs[0] in shardings:
                continue
            same = _same_shape(i.source_mesh, i.target_mesh)
            shardings[i.outputs[0]] = (
                transferred(source, i.target_mesh) if same else NamedSharding(i.target_mesh, PartitionSpec())
            )
        elif i.fragment in made:
            for s, sharding in zip(i.outputs, made[i.fragment]):
                shardings[s] = sharding
        elif i.fragment not in ready and all(s in shardings for s in i.inputs):
            ready[i.fragment] = i
    return ready


Pairs = list[tuple[int, int]]  # (number of an input, number of the result that takes over its buffer)


def _orders(f: Fragment, pairs: Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Inputs and results with the pairs in front, in step: JAX pairs donated inputs with results in order."""
    first, second = [i for i, _ in pairs], [o for _, o in pairs]
    inputs = (*first, *(n for n in range(len(f.invars)) if n not in first))
    return inputs, (*second, *(n for n in range(len(f.outvars)) if n not in second))


def _lower(
    f: Fragment, shardings: list[NamedSharding], fixed: dict[Held, NamedSharding], pairs: Pairs
) -> jax.stages.Lowered:
    results = [fixed.get((v, f.mesh)) for v in f.outvars]
    if not shardings:  # nothing else tells XLA which devices to run on
        results = [s or NamedSharding(f.mesh, PartitionSpec()) for s in results]
    inputs, outputs = _orders(f, pairs)
    compute = jex.jaxpr_as_fun(f.jaxpr)

    def call(*args):
        made = compute(*(args[inputs.index(n)] for n in range(len(args))))
        return [made[n] for n in outputs]

    call.__name__ = "".join(c if c.isalnum() else "_" for c in f.name)
    jitted = jax.jit(
        call,
        in_shardings=tuple(shardings[n] for n in inputs),
        out_shardings=[results[n] for n in outputs],
        donate_argnums=tuple(range(len(pairs))),
        keep_unused=True,
    )
    types = [(f.invars[n].aval, shardings[n]) for n in inputs]
    return jitted.trace(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type) for a, s in types)
    ).lower()


def _donations(
    program: Program, fixed: dict[Held, NamedSharding], donated: set[int]
) -> dict[Fragment, Pairs]:
    """For each fragment, the inputs whose buffers their next values take over.

    An input qualifies if every call of the fragment is its last use, it is the program's to overwrite, and
    its next value is of the same type and sharding.
    """
    received = {t.outputs[0] for t in program.transfers}
    # Another process fetches an array when it comes to it: nothing may be written over it.
    handed = {t.inputs[0] for t in program.transfers if are_apart(t.source_mesh, t.target_mesh)}
    possible: dict[Fragment, set[int]] = {}
    for call in program.calls:
        mine = {
            n
            for n, s in enumerate(call.inputs)
            if s in call.frees
            and s not in received
            and s not in handed
            and (s not in program.inputs or s in donated)
            and call.inputs.count(s) == 1
        }
        possible[call.fragment] = possible.get(call.fragment, mine) & mine

    def kind(v: Var, mesh: Mesh) -> Any:
        return v.aval.shape, v.aval.dtype, fixed.get((v, mesh))

    chosen: dict[Fragment, Pairs] = {}
    for f, numbers in possible.items():
        made = {v: n for n, v in enumerate(f.outvars)}
        nexts = {n: program.successors.get(f.invars[n]) for n in sorted(numbers)}
        chosen[f] = [
            (n, made[v])
            for n, v in nexts.items()
            if v in made and kind(f.invars[n], f.mesh) == kind(v, f.mesh) and (v, f.mesh) in fixed
        ]
    return chosen
