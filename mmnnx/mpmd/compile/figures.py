"""What XLA says of the fragments of a program, one by one and taken together: costs, memory, layouts."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.extend.core as jex

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.program import Program

Stage = jax.stages.Lowered | jax.stages.Compiled


def lower_fragments(program: Program) -> dict[Fragment, jax.stages.Lowered]:
    """Each fragment lowered by itself, without the shardings that its inputs will have."""

    def lower(f: Fragment) -> jax.stages.Lowered:
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in f.invars]
        return jax.jit(jex.jaxpr_as_fun(f.jaxpr)).lower(*types)

    return {f: lower(f) for f in program.fragments}


def total_cost(program: Program, stages: Mapping[Fragment, Stage]) -> dict[str, float]:
    """The costs of one call of the function: those of each fragment as often as it runs.

    What XLA says of single operands is left out, and what it does not know, which is below zero.
    """
    total: dict[str, float] = {}
    for f, times in Counter(c.fragment for c in program.calls).items():
        cost = stages[f].cost_analysis() if f in stages else None
        for name, value in (cost or {}).items():
            if "{" not in name and value >= 0:
                total[name] = total.get(name, 0.0) + times * value
    return total


def total_memory(stages: Iterable[jax.stages.Compiled]) -> Any:
    """The memory of all fragments together: an object with the fields of `jax.stages.Compiled`'s analysis."""
    total: Counter[str] = Counter()
    for stage in stages:
        stats = stage.memory_analysis()
        fields = (name for name in dir(stats) if not name.startswith("_"))
        total.update({name: value for name in fields if isinstance(value := getattr(stats, name), int)})
    return types.SimpleNamespace(**total)


def layouts_of(compiled: Compiled) -> dict[Var, Any]:
    """For each value that a fragment of this process reads or makes, its layout in memory."""
    found: dict[Var, Any] = {}
    for f, e in compiled.executables.items():
        for formats, places, variables in (
            (e.call.input_formats, e.inputs, f.invars),
            (e.call.output_formats, e.outputs, f.outvars),
        ):
            for n, each in zip(places, jax.tree.leaves(formats)):
                found.setdefault(variables[n], each.layout)
    return found
