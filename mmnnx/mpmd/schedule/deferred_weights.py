"""Backwards split in two, the weight parts put off: what zero-bubble schedules have in common."""

from collections.abc import Sequence

from mmnnx.mpmd.ir.timetable import Action


def defer_weights(row: Sequence[Action], lag: int) -> list[Action]:
    """The row with each backward split: its input part in its place, its weight part `lag` input parts later.

    Saved activations are held for that much longer. The last `lag` weight parts end the row.

    Example:
      >>> row = [Action(0, "backward", m) for m in range(3)]
      >>> [(a.phase, a.microbatch) for a in defer_weights(row, lag=1)][:3]
      [('backward-input', 0), ('backward-input', 1), ('backward-weight', 0)]
    """
    split: list[Action] = []
    weights = [a._replace(phase="backward-weight") for a in row if a.phase == "backward"]
    inputs = done = 0
    for action in row:
        if action.phase != "backward":
            split.append(action)
            continue
        split.append(action._replace(phase="backward-input"))
        inputs += 1
        if inputs > lag:
            split.append(weights[done])
            done += 1
    return split + weights[done:]
