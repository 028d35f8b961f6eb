"""Fragments become XLA executables: in parallel, each as soon as its shardings are known, equal ones once."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from jax.sharding import NamedSharding

from mmnnx.mpmd.compile.buffer_shardings import BufferShardings, replicated
from mmnnx.mpmd.compile.donation import Donations, find_donations
from mmnnx.mpmd.compile.executables import CompilePool, CompilerOptions, Executable
from mmnnx.mpmd.distributed.agreement import get_result_specs, put_result_specs
from mmnnx.mpmd.distributed.processes import is_here
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.printing import value_text
from mmnnx.mpmd.ir.program import Program

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """An executable for each fragment of this process, and a sharding for each buffer in use.

    Attributes:
      program: what was compiled.
      executables: for each fragment.
      shardings: by buffer.
      donations: for each fragment, the inputs whose buffers results take over.
    """

    program: Program
    executables: dict[Fragment, Executable]
    shardings: dict[int, NamedSharding]
    donations: dict[Fragment, Donations]


def compile_program(
    program: Program,
    fixed: dict[PlacedVar, NamedSharding],
    donated: set[int],
    program_number: int = 0,
    options: CompilerOptions = (),
) -> Compiled:
    """Compiles every fragment of a program that this process has devices for.

    Fragments that are equal but for their devices, such as those of the stages in the middle of a pipeline,
    are compiled for the first and loaded for the others.

    Args:
      program: what to compile.
      fixed: shardings that are decided: of inputs, results and carries.
      donated: input buffers whose arrays may be overwritten.
      program_number: by which several processes know the program (`agreement.check_same_program`).
      options: for XLA.
    """
    fixed = fixed | replicated(program, fixed)
    donations = find_donations(program, fixed, donated)
    shardings = BufferShardings(program, fixed)
    number = {f: n for n, f in enumerate(program.fragments)}
    executables: dict[Fragment, Executable] = {}
    foreign: set[Fragment] = set()  # those of other processes whose results may be known to them
    with _threads() as threads:
        pool = CompilePool(threads, options)
        while shardings.ready or pool.waiting or foreign:
            ready, shardings.ready = shardings.ready, []
            foreign.update(c.fragment for c in ready if not is_here(c.mesh))
            mine = [c for c in ready if is_here(c.mesh)]
            for c in sorted(mine, key=lambda c: len(c.fragment.jaxpr.eqns), reverse=True):
                f = c.fragment  # the longest is begun first
                pool.begin(f, program.labels[f], [shardings.known[s] for s in c.inputs], fixed, donations[f])
            for f, e in pool.completed():
                executables[f] = e
                logger.info(
                    "compiled %d of %d fragments: %s", len(executables), len(number), program.labels[f]
                )
                specs = e.result_specs(f)
                put_result_specs(program_number, number[f], f.mesh, specs)
                shardings.learn_results(f, specs)
            if foreign and not pool.waiting and not shardings.ready:
                # In the order of the program: two processes must not each wait for what the other says later.
                f = min(foreign, key=number.__getitem__)
                foreign.remove(f)
                specs = get_result_specs(program_number, number[f], f.mesh, len(f.outvars))
                shardings.learn_results(f, specs)
    return Compiled(program, executables, shardings.known, donations)


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core. What one raises does not wait for what has not begun."""
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def compiled_text(compiled: Compiled) -> str:
    """A program as it runs: its instructions, the sharding of each buffer, donations, executables."""
    program = compiled.program
    lines = [str(program), "shardings:"]
    lines += [
        f"  {value_text(program, s)}: {sharding.spec}" for s, sharding in sorted(compiled.shardings.items())
    ]
    lines.append("donations:")
    for f, label in program.labels.items():
        pairs = [f"input {n} to result {k}" for n, k in compiled.donations[f]]
        lines.append(f"  {label}: {', '.join(pairs) or 'none'}")
    lines.append("executables:")
    codes: dict[int, list[str]] = {}
    for f, label in program.labels.items():
        if f in compiled.executables:  # else it is another process's
            codes.setdefault(id(compiled.executables[f].code), []).append(label)
    lines += [f"  one for {', '.join(labels)}" for labels in codes.values()]
    return "\n".join(lines)
