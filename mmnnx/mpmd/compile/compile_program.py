"""Fragments become XLA executables: in parallel, each as soon as its shardings are known, equal ones once."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import NamedSharding

from mmnnx.mpmd.compile.buffer_shardings import BufferShardings, replicated
from mmnnx.mpmd.compile.donation import find_donations
from mmnnx.mpmd.compile.executables import CompilePool, Executable
from mmnnx.mpmd.distributed.agreement import get_result_specs, put_result_specs
from mmnnx.mpmd.distributed.processes import is_here
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import spec_of


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
      program_number: by which several processes know the program (`agreement.check_same_program`).
    """
    fixed = fixed | replicated(program, fixed)
    donations = find_donations(program, fixed, donated)
    shardings = BufferShardings(program, fixed)
    number = {f: n for n, f in enumerate(program.fragments)}
    executables: dict[Fragment, Executable] = {}
    foreign: set[Fragment] = set()  # those of other processes whose results may be known to them
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pool = CompilePool(threads)
        while shardings.ready or pool.waiting or foreign:
            ready, shardings.ready = shardings.ready, []
            foreign.update(c.fragment for c in ready if not is_here(c.mesh))
            mine = [c for c in ready if is_here(c.mesh)]
            for c in sorted(mine, key=lambda c: len(c.fragment.jaxpr.eqns), reverse=True):
                f = c.fragment  # the longest is begun first
                pool.begin(f, [shardings.known[s] for s in c.inputs], fixed, donations[f])
            for f, e in pool.completed():
                executables[f] = e
                results = dict(zip(e.outputs, jax.tree.leaves(e.call.output_shardings)))
                specs = [spec_of(results[n], f.mesh, v.aval.shape) for n, v in enumerate(f.outvars)]
                put_result_specs(program_number, number[f], f.mesh, specs)
                shardings.learn_results(f, specs)
            if foreign and not pool.waiting and not shardings.ready:
                # In the order of the program: two processes must not each wait for what the other says later.
                f = min(foreign, key=number.__getitem__)
                foreign.remove(f)
                specs = get_result_specs(program_number, number[f], f.mesh, len(f.outvars))
                shardings.learn_results(f, specs)
    return Compiled(program, executables, shardings.known)
