"""Backwards cut in two, the weight parts put off: what makes a schedule one of zero bubble."""

from collections.abc import Sequence

from mmnnx.mpmd.ir.timetable import Action


def defer_weights(row: Sequence[Action], lag: int) -> list[Action]:
    """The row with each backward cut: its input part in its place, its weight part `lag` input parts later.

    Residuals are held for that much longer. The last `lag` weight parts end the row.

    Example:
      >>> row = [Action(0, "backward", m) for m in range(3)]
      >>> [(a.phase, a.microbatch) for a in defer_weights(row, lag=1)][:3]
      [('backward-input', 0), ('backward-input', 1), ('backward-weight', 0)]
    """
    cut: list[Action] = []
    weights = [a._replace(phase="backward-weight") for a in row if a.phase == "backward"]
    inputs = done = 0
    for action in row:
        if action.phase != "backward":
            cut.append(action)
            continue
        cut.append(action._replace(phase="backward-input"))
        inputs += 1
        if inputs > lag:
            cut.append(weights[done])
            done += 1
    return cut + weights[done:]
