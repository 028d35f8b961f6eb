"""In which order the fragments of a microbatch loop are dispatched.

A schedule orders what it knows, the forwards and backwards of each stage; everything else follows by
dependency. The order is found by playing the loop through with unit costs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from mmnnx.mpmd.ir.dataflow import running_sums
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, LoopPlan
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.ir.timetable import PARTS, Phase
from mmnnx.mpmd.schedule.list_scheduling import Jobs, Stuck, play
from mmnnx.printable import first_few

Instance = tuple[int, int]  # (index of a fragment in the body, microbatch)


# From a microbatch to the mesh that a moving task runs on: `Task.loop_dependent_mesh_slice`.
Moves = Mapping[Mesh, Callable[[int], Mesh]]


class CannotBeOrdered(ValueError):
    """A schedule asks for fragments in an order in which they cannot run."""


def order_loop(plan: LoopPlan, moving: Moves) -> list[Instance]:
    """The order in which all fragments of all microbatches are dispatched.

    Args:
      plan: the loop.
      moving: for meshes that stand for several, which one it is for each microbatch.

    Raises:
      CannotBeOrdered: if its schedule asks for something before what it depends on.
      ValueError: if it names what is not there.
    """
    fragments, length = plan.body.fragments, plan.loop.spec.length
    count = len(fragments)
    asked = _named_rows(plan) if plan.loop.spec.names_tasks else _rows(plan)
    # Of several fragments that one action is made of, the first keeps its place; the others follow.
    rows = [[m * count + indices[0] for indices, m in row] for row in asked]
    share = Counter((f.position, f.phase) for f in fragments)
    unit = UNIT_COSTS | {"none": 0.0}
    costs = [unit[f.phase] / share[f.position, f.phase] for f in fragments]
    waits = _dependencies(plan)
    # What follows a scheduled action goes ahead of the next. Only a moving task, which no schedule orders,
    # fills idle time.
    scheduled = {indices[0] for row in asked for indices, _ in row}
    unscheduled = [(n, f) for n, f in enumerate(fragments) if n not in scheduled]
    early = [n for n, f in unscheduled if f.mesh not in moving or f.phase != "forward"]
    moves = [(f.mesh, moving.get(f.mesh)) for f in fragments]
    jobs = Jobs(
        [mesh if moved is None else moved(m) for m in range(length) for mesh, moved in moves],
        costs * length,
        [waits(n, m) for m in range(length) for n in range(count)],
        rows,
        frozenset(m * count + n for m in range(length) for n in early),
    )

    named = Counter(f.name for f in fragments)
    stage = {position: n for n, position in enumerate(plan.timetable.positions)}

    def name(job: int) -> str:
        f = fragments[job % count]
        which = f" (stage {stage[f.position]})" if named[f.name] > 1 and f.position in stage else ""
        return f"{f.name}{which} of microbatch {job // count}"

    try:
        return [(job % count, job // count) for _, job in play(jobs)]
    except Stuck as stuck:
        heads, waiting = list(map(name, stuck.heads)), []
        advice = ""
        for job in stuck.heads:
            missing = [j for j in jobs.waits[job] if j in stuck.left]
            for other in missing:
                f, awaited = fragments[job % count], fragments[other % count]
                if job // count > other // count and not plan.loop.spec.rows:
                    raise CannotBeOrdered(
                        f"schedule {plan.timetable.schedule!r} needs microbatches in an order in which they "
                        f"cannot run: {name(job)} waits for {name(other)}. {_advice_on_order(f, awaited)}"
                    ) from None
                if f.phase == "backward-weight" and f.position != awaited.position:
                    advice = (
                        ". In each microbatch the gradients of a stage's weights wait for other stages, as "
                        "they do where their common norm scales them: '1f1b' runs that, and all schedules "
                        "do where gradients are scaled after the loop"
                    )
            waiting += [f"{name(job)} waits for {', '.join(map(name, missing))}"] if missing else []
        raise CannotBeOrdered(
            f"schedule {plan.timetable.schedule!r} cannot run: each TaskMesh waits for another. "
            f"Next on each: {'; '.join(heads)}. And {'; '.join(waiting)}{advice}"
        ) from None


def _advice_on_order(f: Fragment, awaited: Fragment) -> str:
    """Why a fragment waits for one of an earlier microbatch, and what to do."""
    if f.phase == "forward" != awaited.phase:
        return (
            "Each microbatch reads what the backward of the one before leaves: schedule='sequential' runs "
            "them one after the other"
        )
    return (
        "State that the loop updates takes them in order, and so does a sum of gradients that two stages of "
        "one mesh add to: '1f1b' and 'gpipe' do, or give the stages weights of their own"
    )


Asked = list[tuple[list[int], int]]  # (the fragments that an action is made of, microbatch), in order


def _rows(plan: LoopPlan) -> list[Asked]:
    """The actions of a table, as fragments; those of phases that a stage does not have are left out."""
    parts: dict[tuple[int, str], list[int]] = {}
    for n, f in enumerate(plan.body.fragments):
        if f.position is not None:
            parts.setdefault((f.position, f.phase), []).append(n)
    times = plan.timetable

    @functools.cache
    def made_of(stage: int, phase: Phase) -> list[list[int]]:
        """The fragments of actions; a backward that was split in two is one after the other."""
        phases = [phase, *PARTS] if phase == "backward" else [phase]
        found = (parts.get((times.positions[stage], each)) for each in phases)
        return [indices for indices in found if indices]

    return [
        [(indices, microbatch) for stage, phase, microbatch in row for indices in made_of(stage, phase)]
        for row in times.table
    ]


def _named_rows(plan: LoopPlan) -> list[Asked]:
    """The actions of a custom schedule that names tasks or fragments."""
    fragments, spec = plan.body.fragments, plan.loop.spec
    by_name: dict[str, list[int]] = {}
    for n, f in enumerate(fragments):
        by_name.setdefault(f.name, []).append(n)
    for task in {f.task for f in fragments} - by_name.keys():
        own = {f.name for f in fragments if f.task == task}
        if len(own) == 1:  # a task of one phase goes by its own name
            by_name[task] = by_name[own.pop()]
    given = Counter(entry for row in spec.rows for entry in row)
    wrong: list[str] = []
    for name in dict.fromkeys(name for _, name in given):
        if name not in by_name:
            known = ", ".join(map(repr, by_name))
            wrong.append(f"{name!r} is not there (there are {known})")
            continue
        for m in range(spec.length):
            if given[m, name] != 1:
                wrong.append(f"{name!r} of microbatch {m} is there {given[m, name]} times")
    wrong += [f"{name!r} of microbatch {m} does not exist" for m, name in given if not 0 <= m < spec.length]
    for number, row in enumerate(spec.rows):
        meshes = {fragments[by_name[name][0]].mesh for _, name in row if name in by_name}
        if len(meshes) > 1:
            names = ", ".join(dict.fromkeys(repr(name) for _, name in row))
            wrong.append(f"row {number} names what runs on {len(meshes)} TaskMeshes: {names}")
    if wrong:
        raise ValueError(f"custom_schedule, for {spec.length} microbatches: " + first_few(wrong, 4, "; "))
    return [[(by_name[name], m) for m, name in row] for row in spec.rows]


def sums(plan: LoopPlan) -> set[Var]:
    """The carries that microbatches add to in any order: each adds to what was added to last."""
    readers: dict[Var, list[Fragment]] = {}
    for f in plan.body.fragments:
        for v in f.invars:
            readers.setdefault(v, []).append(f)
    leaves, meshes = (dict(zip(plan.loop.carry_in, x)) for x in (plan.loop.carry_out, plan.carried))
    return {
        v
        for v in running_sums(plan.loop)
        if all(f.mesh in meshes[v] and leaves[v] in f.outvars for f in readers.get(v, ()))
    }


def _dependencies(plan: LoopPlan) -> Callable[[int, int], list[int]]:
    """From a fragment and a microbatch to the jobs that it waits for."""
    fragments, count = plan.body.fragments, len(plan.body.fragments)
    made: dict[Var, list[int]] = {}
    for index, f in enumerate(fragments):
        for v in f.outvars:
            made.setdefault(v, []).append(index)
    leaves = dict(zip(plan.loop.carry_in, plan.loop.carry_out))
    any_order = sums(plan)

    def makers(var: Var, f: Fragment) -> list[int]:
        home = plan.body.homes.get(var)
        return [i for i in made.get(var, ()) if fragments[i].mesh == (home or f.mesh)]

    same: list[list[int]] = []  # for each fragment, those it waits for of the same microbatch ...
    both: list[list[int]] = []  # ... and with them those of the one before
    for f in fragments:
        found: tuple[dict[int, None], dict[int, None]] = ({}, {})
        for v in f.invars:
            if v not in any_order:
                found[v in leaves].update(dict.fromkeys(makers(leaves.get(v, v), f)))
        same.append(list(found[False]))
        both.append([*found[False], *(i - count for i in found[True])])

    def waits(n: int, m: int) -> list[int]:
        return [m * count + i for i in (both if m else same)[n]]

    return waits
