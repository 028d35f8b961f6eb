"""Wavefront: the hyperplane method (Lamport 1974, "The parallel execution of DO loops", CACM 17(2)).

Actions are numbered so that each has a higher number than all that it waits for. Those of one number, a
diagonal of the plane of stages and microbatches, could all run at once.
"""

from mmnnx.mpmd.ir.timetable import Action, Phase, Stages
from mmnnx.mpmd.schedule.base import register_schedule

PHASES: tuple[Phase, ...] = ("backward", "forward")  # on one diagonal, what frees activations goes first


@register_schedule("wavefront")
def wavefront(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Each mesh runs its actions diagonal by diagonal, whatever graph the stages are and wherever they lie.

    On a chain with one stage a mesh this is eager 1F1B: bubble (S-1)/(M+S-1); stage s holds saved activations
    of at most 2(S-s) - 1 microbatches. With several stages on a mesh, each holds as many as it would alone.

    Example:
      >>> [a.stage for a in wavefront(Stages(meshes=(0, 0, 1), reads=((), (), (0, 1))), 1)[0]]
      [0, 1, 0, 1]
    """
    before: list[int] = []  # for each stage, how many stages lie on the longest way to it
    for reads in stages.reads:
        before.append(max((before[r] + 1 for r in reads), default=0))
    turn = max(before) + 1  # the diagonal on which the first backward lies

    def diagonal(action: Action) -> int:
        s = action.stage
        return action.microbatch + (before[s] if action.phase == "forward" else turn + stages.after[s])

    rows: dict[int, list[Action]] = {}
    for s, mesh in enumerate(stages.meshes):
        for phase in PHASES:
            rows.setdefault(mesh, []).extend(Action(s, phase, m) for m in range(num_microbatches))
    return [sorted(row, key=diagonal) for row in rows.values()]
