"""Rows of schedules with a V-shaped placement: two stages on each mesh, a letter for each action."""

from collections import Counter, deque

from mmnnx.mpmd.ir.timetable import Action, Phase

LETTERS: dict[str, Phase] = {"f": "forward", "b": "backward", "i": "backward-input"}


def row_of(word: str, down: int, up: int) -> list[Action]:
    """The row of a mesh with stage `down` on the way down the V and stage `up` on the way back up.

    f is a forward, b a whole backward and i the input part of one, each of the next microbatch of its stage:
    `down` in lower case, `up` in upper case. w is the oldest weight part that is owed on either. What is
    still owed at the end of the word follows it.

    Example:
      >>> [(a.stage, a.phase, a.microbatch) for a in row_of("fFI", down=0, up=3)][1:]
      [(3, 'forward', 0), (3, 'backward-input', 0), (3, 'backward-weight', 0)]
    """
    row: list[Action] = []
    begun: Counter[tuple[int, bool]] = Counter()  # forwards, and backwards of either kind, of each stage
    owed: deque[Action] = deque()
    for letter in word:
        if letter == "w":
            row.append(owed.popleft())
            continue
        phase, stage = LETTERS[letter.lower()], up if letter.isupper() else down
        action = Action(stage, phase, begun[stage, phase == "forward"])
        begun[stage, phase == "forward"] += 1
        row.append(action)
        if phase == "backward-input":
            owed.append(action._replace(phase="backward-weight"))
    return row + list(owed)
