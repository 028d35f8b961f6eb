"""Fragments become XLA executables: in parallel, each as soon as its shardings are known, equal ones once.

What crosses between fragments keeps the sharding that XLA gave it where it was made; what is carried around a
loop, returned, or sent to a mesh of another shape has one that is decided here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.compile.donation import Pairs, donations
from mmnnx.mpmd.compile.lower import Lowered, likeness, lower
from mmnnx.mpmd.distributed.agreement import get_result_specs, put_result_specs
from mmnnx.mpmd.distributed.processes import is_here
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.instructions import Call, Instruction, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import same_shape, spec_of, transferred


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled fragment.

    Attributes:
      call: takes the fragment's inputs and returns its results, in orders of its own.
      inputs, outputs: which input (result) of the fragment comes where in them.
      code: what `call` is of, to stay in use with it.
    """

    call: jax.stages.Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    code: Code


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """What was compiled for one mesh, and loaded for others. (What was loaded cannot be loaded from.)"""

    mesh: Mesh
    compiled: jax.stages.Compiled
    loaded: dict[Mesh, jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def on(self, mesh: Mesh, lower_there: Callable[[], Lowered]) -> jax.stages.Compiled:
        if mesh == self.mesh:
            return self.compiled
        if mesh not in self.loaded:
            results = jax.tree.leaves(self.compiled.output_shardings)
            named = all(isinstance(s, NamedSharding) for s in results)  # or nothing says how to move it
            self.loaded[mesh] = (
                _compat.load_for(self.compiled, mesh) if named else lower_there().stage.compile()
            )
        return self.loaded[mesh]


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """An executable for each fragment of this process, and a sharding for each buffer in use."""

    program: Program
    executables: dict[Fragment, Executable]
    shardings: dict[int, NamedSharding]


def compile_program(
    program: Program, fixed: dict[PlacedVar, NamedSharding], donated: set[int], program_number: int = 0
) -> Compiled:
    """Compiles every fragment of a program that this process has devices for.

    Fragments that are equal but for their devices, such as those of the stages in the middle of a pipeline,
    are compiled for the first and loaded for the others.

    Args:
      program: what to compile.
      fixed: shardings that are decided: of inputs, results and carries.
      donated: input buffers whose arrays may be overwritten.
      program_number: by which several processes know the program (`Peers.agree`).
    """
    fixed = fixed | _replicated(program, fixed)
    pairs = donations(program, fixed, donated)
    known = _Known(program, fixed)
    number = {f: n for n, f in enumerate(program.fragments)}
    executables: dict[Fragment, Executable] = {}
    foreign: set[Fragment] = set()  # those of other processes whose results may be known to them
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        once = _Once(pool)
        while known.ready or once.waiting or foreign:
            ready, known.ready = known.ready, []
            foreign.update(c.fragment for c in ready if not is_here(c.mesh))
            mine = [c for c in ready if is_here(c.mesh)]
            for c in sorted(mine, key=lambda c: len(c.fragment.jaxpr.eqns), reverse=True):
                f = c.fragment  # the longest is begun first
                once.begin(f, [known.of[s] for s in c.inputs], fixed, pairs[f])
            for f, e in once.completed():
                executables[f] = e
                results = dict(zip(e.outputs, jax.tree.leaves(e.call.output_shardings)))
                specs = [spec_of(results[n], f.mesh, v.aval.shape) for n, v in enumerate(f.outvars)]
                put_result_specs(program_number, number[f], f.mesh, specs)
                known.made(f, specs)
            if foreign and not once.waiting and not known.ready:
                # In the order of the program: two processes must not each wait for what the other says later.
                f = min(foreign, key=number.__getitem__)
                foreign.remove(f)
                known.made(f, get_result_specs(program_number, number[f], f.mesh, len(f.outvars)))
    return Compiled(program, executables, known.of)


# What programs in use have, by key. A function is cut once more when arguments come from elsewhere, as
# counters do after their first step, and most of its fragments are what they were.
_in_use: WeakValueDictionary[Any, Code] = WeakValueDictionary()


class _Once:
    """Compiles in a pool of threads, and what is equal but for its devices once."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.lowered: dict[Any, Lowered] = {}
        self.code: dict[Any, Future[Code]] = {}
        self.waiting: dict[Fragment, tuple[Lowered, Callable[[], Lowered]]] = {}

    def begin(
        self,
        f: Fragment,
        shardings: Sequence[NamedSharding],
        fixed: Mapping[PlacedVar, NamedSharding],
        pairs: Pairs,
    ) -> None:
        own = functools.partial(lower, f, shardings, fixed, pairs)
        like = likeness(f, shardings, fixed, pairs)
        low = self.lowered.get(like) or own()
        if like is not None and low.is_shared:
            self.lowered[like] = low
        self.waiting[f] = low, own
        if low.key not in self.code:
            there = _in_use.get(low.key)
            compiling = lambda: Code(f.mesh, low.stage.compile())
            self.code[low.key] = self.pool.submit(compiling) if there is None else _finished(there)

    def completed(self) -> Iterator[tuple[Fragment, Executable]]:
        """The fragments that are compiled, as soon as there are any; none if none was begun."""
        done, _ = wait([self.code[low.key] for low, _ in self.waiting.values()], None, FIRST_COMPLETED)
        for f, (low, own) in list(self.waiting.items()):
            if (future := self.code[low.key]) in done:
                del self.waiting[f]
                code = _in_use[low.key] = future.result()
                yield f, Executable(code.on(f.mesh, own), low.inputs, low.outputs, code)


def _finished(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _Known:
    """The shardings of buffers that are known so far.

    Attributes:
      of: by buffer.
      ready: the first calls of fragments whose inputs are known; who compiles them takes them off.
    """

    def __init__(self, program: Program, fixed: Mapping[PlacedVar, NamedSharding]):
        self.of: dict[int, NamedSharding] = {}
        self.calls: dict[Fragment, list[Call]] = {}
        self.readers: dict[int, list[Instruction]] = {}
        for i in program.instructions:
            if isinstance(i, Call):
                self.calls.setdefault(i.fragment, []).append(i)
            if isinstance(i, Transfer) or len(self.calls[i.fragment]) == 1:
                for s in set(i.inputs):
                    self.readers.setdefault(s, []).append(i)
        self.missing = {f: len(set(calls[0].inputs)) for f, calls in self.calls.items()}
        self.ready = [calls[0] for f, calls in self.calls.items() if not self.missing[f]]
        for s, held in enumerate(program.values):
            if held in fixed:
                self.learn(s, fixed[held])

    def learn(self, buffer: int, sharding: NamedSharding) -> None:
        """Takes note of a sharding, and of those of copies on other meshes."""
        if buffer in self.of:
            return
        self.of[buffer] = sharding
        for i in self.readers.get(buffer, ()):
            if isinstance(i, Transfer):
                same = same_shape(i.source_mesh, i.target_mesh)
                there = NamedSharding(i.target_mesh, PartitionSpec())
                self.learn(i.outputs[0], transferred(sharding, i.target_mesh) if same else there)
            else:
                self.missing[i.fragment] -= 1
                self.ready += [] if self.missing[i.fragment] else [i]

    def made(self, f: Fragment, specs: Sequence[PartitionSpec]) -> None:
        """Takes note of the shardings of a fragment's results, in all of its calls."""
        for call in self.calls[f]:
            for s, spec in zip(call.outputs, specs):
                self.learn(s, NamedSharding(f.mesh, spec))


def _replicated(program: Program, fixed: Mapping[PlacedVar, NamedSharding]) -> dict[PlacedVar, NamedSharding]:
    """Values that go to a mesh of another shape, and all values of one-device meshes: one copy a device."""
    found: dict[PlacedVar, NamedSharding] = {}
    for held in program.values:
        if held[1].size == 1:
            found[held] = NamedSharding(held[1], PartitionSpec())
    for t in program.transfers:
        held = program.values[t.inputs[0]]
        if not same_shape(t.source_mesh, t.target_mesh) and held not in fixed:
            found[held] = NamedSharding(t.source_mesh, PartitionSpec())
    return {held: s for held, s in found.items() if held not in fixed}
