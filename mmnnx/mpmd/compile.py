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
from mmnnx.mpmd.program import Call, Program, Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program with an executable for each fragment and a sharding for each slot."""

    program: Program
    executables: dict[Fragment, Callable[..., Any]]
    shardings: tuple[NamedSharding, ...]


def compile_program(program: Program, fixed: dict[Held, NamedSharding], donated: set[int]) -> Compiled:
    """Compiles every fragment of a program.

    Args:
      program: what to compile.
      fixed: shardings that are decided: of inputs, results and carries.
      donated: input slots whose arrays may be overwritten.
    """
    shardings: list[NamedSharding | None] = [None] * len(program.values)
    fixed = fixed | _replicated(program, fixed)
    for slot in program.inputs:
        shardings[slot] = fixed[program.values[slot]]
    donations = _donations(program, fixed, donated)
    executables: dict[Fragment, Callable[..., Any]] = {}
    made: dict[Fragment, tuple[NamedSharding, ...]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while len(made) < len(program.fragments):
            ready = _propagate(program, made, shardings)
            lowered = {
                f: _lower(f, [shardings[s] for s in call.inputs], fixed, donations[f])
                for f, call in ready.items()
            }
            for f, compiled in zip(lowered, pool.map(lambda low: low.compile(), lowered.values())):
                executables[f] = compiled
                made[f] = tuple(
                    NamedSharding(f.mesh, s.spec) for s in jax.tree.leaves(compiled.output_shardings)
                )
    _propagate(program, made, shardings)
    return Compiled(program, executables, tuple(shardings))


def transferred(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """The sharding of a copy on another mesh of the same shape: the same spec, axis by axis."""
    renamed = dict(zip(sharding.mesh.axis_names, mesh.axis_names))

    def rename(entry: Any) -> Any:
        return tuple(renamed[a] for a in entry) if isinstance(entry, tuple) else renamed.get(entry)

    return NamedSharding(mesh, PartitionSpec(*map(rename, sharding.spec)))


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
    shardings: list[NamedSharding | None],
) -> dict[Fragment, Call]:
    """Fills in the shardings that are known, and returns the fragments that can be compiled now."""
    ready: dict[Fragment, Call] = {}
    for i in program.instructions:
        if isinstance(i, Transfer):
            source = shardings[i.inputs[0]]
            if source is None or shardings[i.outputs[0]] is not None:
                continue
            same = _same_shape(i.source_mesh, i.target_mesh)
            shardings[i.outputs[0]] = (
                transferred(source, i.target_mesh) if same else NamedSharding(i.target_mesh, PartitionSpec())
            )
        elif i.fragment in made:
            for s, sharding in zip(i.outputs, made[i.fragment]):
                shardings[s] = sharding
        elif i.fragment not in ready and all(shardings[s] is not None for s in i.inputs):
            ready[i.fragment] = i
    return ready


def _lower(
    f: Fragment,
    inputs: list[NamedSharding],
    fixed: dict[Held, NamedSharding],
    donate: tuple[int, ...],
) -> jax.stages.Lowered:
    outputs = [fixed.get((v, f.mesh)) for v in f.outvars]
    if not inputs:  # nothing else tells XLA which devices to run on
        outputs = [o or NamedSharding(f.mesh, PartitionSpec()) for o in outputs]
    fun = jex.jaxpr_as_fun(f.jaxpr)
    fun = _named(fun, f.name)
    jitted = jax.jit(
        fun, in_shardings=tuple(inputs), out_shardings=outputs, donate_argnums=donate, keep_unused=True
    )
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s, weak_type=v.aval.weak_type)
        for v, s in zip(f.invars, inputs)
    ]
    return jitted.trace(*avals).lower()


def _named(fun: Callable, name: str) -> Callable:
    def call(*args):
        return fun(*args)

    call.__name__ = "".join(c if c.isalnum() else "_" for c in name)
    return call


def _donations(
    program: Program, fixed: dict[Held, NamedSharding], donated: set[int]
) -> dict[Fragment, tuple[int, ...]]:
    """For each fragment, the inputs whose buffers its results take over.

    An input qualifies if every call of the fragment is its last use, it is the program's to overwrite, and
    a result of the same type has the same decided sharding.
    """
    received = {t.outputs[0] for t in program.transfers}
    possible: dict[Fragment, set[int]] = {}
    for call in program.calls:
        mine = {
            n
            for n, s in enumerate(call.inputs)
            if s in call.frees
            and s not in received
            and (s not in program.inputs or s in donated)
            and call.inputs.count(s) == 1
        }
        possible[call.fragment] = possible.get(call.fragment, mine) & mine
    chosen: dict[Fragment, tuple[int, ...]] = {}
    for f, numbers in possible.items():
        free = [(v.aval.shape, v.aval.dtype, fixed.get((v, f.mesh))) for v in f.outvars]
        taken = []
        for n in sorted(numbers):
            v = f.invars[n]
            kind = (v.aval.shape, v.aval.dtype, fixed.get((v, f.mesh)))
            if kind[2] is not None and kind in free:
                free.remove(kind)
                taken.append(n)
        chosen[f] = tuple(taken)
    return chosen
