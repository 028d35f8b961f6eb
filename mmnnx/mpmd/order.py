"""In which order the fragments of a microbatch loop are dispatched.

A schedule orders what it knows, the forwards and backwards of each stage; everything else follows by
dependency. The order is found by playing the loop through with one unit of time per fragment.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.fragments import Fragment, LoopPlan
from mmnnx.mpmd.microbatch import LoopSpec
from mmnnx.mpmd.schedule import Action, get_schedule
from mmnnx.mpmd.trace import Var

Instance = tuple[int, int]  # (index of a fragment in the body, microbatch)
Queue = deque[tuple[int, Action]]  # of a position: what its schedule asks for, in order


def order_loop(plan: LoopPlan) -> list[Instance]:
    """The order in which all fragments of all microbatches are dispatched.

    Raises:
      ValueError: if the loop has another number of stages than was asked for, or if its schedule asks for
        something before what it depends on.
    """
    spec, fragments = plan.loop.spec, plan.body.fragments
    num_stages = max(plan.depths.values(), default=0) + 1
    if spec.num_stages is not None and spec.num_stages != num_stages:
        raise ValueError(
            f"microbatch: num_stages={spec.num_stages}, but the loop runs through {num_stages} stages: "
            f"{', '.join(dict.fromkeys(f.name for f in fragments))}"
        )
    schedule = get_schedule(spec.schedule)
    by_action: dict[tuple[int, str], list[int]] = {}
    unordered = []
    for index, f in enumerate(fragments):
        if f.position in plan.depths and f.phase != "none":
            by_action.setdefault((f.position, f.phase), []).append(index)
        else:
            unordered.append(index)
    queues: dict[Mesh, list[Queue]] = {}
    for position, depth in plan.depths.items():
        actions = [Action(*a) for a in schedule(depth, num_stages, spec.length)]
        _check_table(actions, spec, depth, num_stages)
        mine = deque((position, a) for a in actions if (position, a.phase) in by_action)
        first = next(f for f in fragments if f.position == position)
        queues.setdefault(first.mesh, []).append(mine)
    return _play(plan, by_action, queues, unordered)


def _check_table(actions: Sequence[Action], spec: LoopSpec, stage: int, num_stages: int) -> None:
    """Each stage must run the forward and the backward of every microbatch once."""
    expected = {Action(phase, m) for phase in ("forward", "backward") for m in range(spec.length)}
    counts = Counter(actions)
    wrong = [f"{a.phase} {a.microbatch} is missing" for a in expected - counts.keys()]
    wrong += [f"{a.phase} {a.microbatch} does not exist" for a in counts.keys() - expected]
    wrong += [f"{a.phase} {a.microbatch} is there {n} times" for a, n in counts.items() if n > 1]
    if wrong:
        raise ValueError(
            f"schedule {spec.schedule!r} with {spec.length} microbatches, stage {stage} of {num_stages}: "
            + "; ".join(sorted(wrong)[:4])
        )


def _play(
    plan: LoopPlan,
    by_action: dict[tuple[int, str], list[int]],
    queues: dict[Mesh, list[Queue]],
    unordered: list[int],
) -> list[Instance]:
    fragments, length = plan.body.fragments, plan.loop.spec.length
    waits = _dependencies(plan)
    finished: dict[Instance, int] = {}
    idle_from: dict[Mesh, int] = {}
    # What follows by dependency alone, per mesh and by microbatch: it goes ahead of the schedule as soon as
    # it can. Nothing waits for a later microbatch, so one of the first in line can always run.
    pending: dict[Mesh, list[Instance]] = {f.mesh: [] for f in fragments}
    for m in range(length):
        for index in unordered:
            pending[fragments[index].mesh].append((index, m))
    order: list[Instance] = []

    def earliest(instance: Instance) -> int | None:
        index, m = instance
        needed = [(i, m - back) for i, back in waits[index] if m >= back]
        if any(n not in finished for n in needed):
            return None
        mesh = fragments[index].mesh
        return max([idle_from.get(mesh, 0), *(finished[n] for n in needed)])

    total = len(fragments) * length
    while len(order) < total:
        best: tuple[int, int, Instance, Queue | None] | None = None
        for number, mesh in enumerate(pending):
            choices: list[tuple[Instance, Queue | None]] = [
                (i, None) for i in pending[mesh][: 2 * len(fragments)]
            ]
            for asked in queues.get(mesh, ()):
                if asked:
                    position, action = asked[0]
                    choices.append(((by_action[position, action.phase][0], action.microbatch), asked))
            for instance, queue in choices:
                start = earliest(instance)
                if start is not None and (best is None or (start, number) < best[:2]):
                    best = (start, number, instance, queue)
        if best is None:
            stuck = [
                f"{fragments[by_action[p, a.phase][0]].name} of microbatch {a.microbatch}"
                for qs in queues.values()
                for q in qs
                if q
                for p, a in [q[0]]
            ]
            raise ValueError(
                f"schedule {plan.loop.spec.schedule!r} cannot run: each TaskMesh waits for another. "
                f"Next on each: {'; '.join(stuck)}"
            )
        start, _, (index, m), queue = best
        mesh = fragments[index].mesh
        finished[index, m] = idle_from[mesh] = start + 1
        order.append((index, m))
        if queue is None:
            pending[mesh].remove((index, m))
        else:
            position, action = queue.popleft()
            for i in by_action[position, action.phase][1:]:
                bisect.insort(pending[mesh], (i, m), key=_microbatch)
    return order


def _microbatch(instance: Instance) -> int:
    return instance[1]


def _dependencies(plan: LoopPlan) -> list[list[tuple[int, int]]]:
    """For each fragment of the body: the fragments it waits for, of how many microbatches before."""
    fragments = plan.body.fragments
    made: dict[Var, list[int]] = {}
    for index, f in enumerate(fragments):
        for v in f.outvars:
            made.setdefault(v, []).append(index)
    leaves = dict(zip(plan.loop.carry_in, plan.loop.carry_out))

    def makers(var: Var, f: Fragment) -> list[int]:
        home = plan.body.homes.get(var)
        return [i for i in made.get(var, ()) if fragments[i].mesh == (home or f.mesh)]

    waits: list[list[tuple[int, int]]] = []
    for f in fragments:
        found: dict[tuple[int, int], None] = {}
        for v in f.invars:
            before = leaves.get(v)
            if before is None:
                found.update({(i, 0): None for i in makers(v, f)})
            else:
                found.update({(i, 1): None for i in makers(before, f)})
        waits.append(list(found))
    return waits
