"""Tables of actions: checked, and played through on a chain or graph of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Event, Timeline
from mmnnx.mpmd.ir.timetable import PARTS, PHASES, Action, Phase, Stages, Table
from mmnnx.mpmd.schedule.list_scheduling import Jobs, Stuck, play


def check_table(
    table: Table,
    stages: Stages,
    num_microbatches: int,
    name: str = "custom",
    parts: Mapping[int, Collection[str]] | None = None,
) -> None:
    """Checks that every stage runs the forward and the backward of every microbatch once.

    A backward is one "backward", or a "backward-input" and a "backward-weight".

    Args:
      table: rows of actions.
      stages: what it is for.
      num_microbatches: how many there are.
      name: of the schedule, for messages.
      parts: for each stage, which of the two parts its backward has; none for a stage without a backward. A
        table may have the others nevertheless. Default: both.

    Raises:
      ValueError: names the actions that are missing, unknown, there twice, or in a row of another mesh.
    """
    counts = Counter(a for row in table for a in row)
    wrong = []
    length = 1 + max((a.microbatch for a in counts), default=-1)
    if length > num_microbatches:
        wrong.append(f"the table has {length} microbatches")
    for a in counts:
        known = a.phase in PHASES
        if not (0 <= a.stage < stages.num_stages and 0 <= a.microbatch < num_microbatches and known):
            wrong.append(f"{describe(a)} does not exist")
    enough = 4  # a table of one wrong number may lack any number of actions
    for s, m in ((s, m) for s in range(stages.num_stages) for m in range(num_microbatches)):
        if len(wrong) > enough:
            break
        whole = Action(s, "backward", m)
        halves = [Action(s, part, m) for part in PARTS]
        needed = halves if parts is None else [h for h in halves if h.phase in parts.get(s, ())]
        backward = [whole] if whole in counts or not any(h in counts for h in halves) else needed
        expected = [Action(s, "forward", m), *(backward if needed else [])]
        wrong += [f"{describe(a)} is missing" for a in expected if a not in counts]
        wrong += [f"{describe(a)} is there {counts[a]} times" for a in expected if counts[a] > 1]
        if whole in counts:
            wrong += [f"{describe(h)} is there beside the whole backward" for h in halves if h in counts]
    for number, row in enumerate(table):
        meshes = {stages.meshes[a.stage] for a in row if 0 <= a.stage < stages.num_stages}
        if len(meshes) > 1:
            wrong.append(f"row {number} has stages of meshes {', '.join(map(str, sorted(meshes)))}")
    if wrong:
        raise ValueError(
            f"schedule {name!r} for {stages.num_stages} stages and {num_microbatches} microbatches: "
            + "; ".join(wrong[:enough])
            + ("; and more" if len(wrong) > enough else "")
        )


def describe(a: Action) -> str:
    """An action in words."""
    return f"{a.phase} of microbatch {a.microbatch} on stage {a.stage}"


def simulate(table: Table, stages: Stages, costs: Mapping[str, float] = UNIT_COSTS) -> Timeline:
    """Plays a table through: each stage is its mesh's share of the model, 1 / (stages on that mesh).

    Args:
      table: a table that `check_table` accepts.
      stages: what it is for.
      costs: time that a mesh takes for each phase of all of its stages.

    Raises:
      ValueError: for a table in which meshes wait for each other.
    """
    actions = [a for row in table for a in row]
    # By a plain tuple, which is equal to an Action, and quicker to make.
    job = {(a.stage, a.phase, a.microbatch): n for n, a in enumerate(actions)}
    share = Counter(stages.meshes)
    readers: list[list[int]] = [[] for _ in stages.meshes]
    for s, before in enumerate(stages.reads):
        for r in before:
            readers[r].append(s)

    def backward(s: int, m: int) -> int | None:
        """The job that makes the gradients that stages before s wait for."""
        whole = job.get((s, "backward", m))
        return job.get((s, "backward-input", m)) if whole is None else whole

    def made(maker: tuple[int, Phase], m: int) -> int | None:
        """The job that ends what a stage does in a phase."""
        s, phase = maker
        whole = job.get((s, phase, m))
        return job.get((s, "backward-weight", m), whole) if phase == "backward" else whole

    def waits(a: Action) -> list[int]:
        s, m = a.stage, a.microbatch
        if a.phase == "forward":
            needed = [job.get((r, "forward", m)) for r in stages.reads[s]]
        elif a.phase == "backward-weight":
            needed = [job.get((s, "backward-input", m))]
        else:
            needed = [job.get((s, "forward", m)), *[backward(r, m) for r in readers[s]]]
        needed += [
            made(maker, m - 1) for maker, reader in stages.carried if reader == (s, a.phase.split("-")[0])
        ]
        return [n for n in needed if n is not None]

    cost = {(s, phase): costs[phase] / share[mesh] for s, mesh in enumerate(stages.meshes) for phase in costs}
    jobs = Jobs(
        [stages.meshes[a.stage] for a in actions],
        [cost[a.stage, a.phase] for a in actions],
        [waits(a) for a in actions],
        [[job[a] for a in row] for row in table],
    )
    try:
        order = play(jobs)
    except Stuck as stuck:
        raise ValueError(
            "these wait for each other, or for a later action of their row: "
            + "; ".join(describe(actions[j]) for j in stuck.heads)
        ) from None
    return Timeline(
        tuple(
            Event(
                f"mesh{jobs.meshes[j]}",
                start,
                start + jobs.costs[j],
                actions[j].phase,
                actions[j].microbatch,
                f"stage{actions[j].stage} {actions[j].phase}",
                actions[j].stage,
            )
            for start, j in order
        )
    )
