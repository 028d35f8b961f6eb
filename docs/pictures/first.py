"""Makes the picture of the first page, light and dark: `python docs/pictures/first.py [FOLDER]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np
from draw import FOLDER, step

import mmnnx as mm


def main(folder: Path) -> None:
    """A small language model on four stages of two devices: a step under 1F1B, over what two stages hold."""
    mesh, arguments, train_step = step(2)
    with mesh:
        program, plan = train_step.program(*arguments), mm.plan(train_step, *arguments)
        for dark, end in ((False, ""), (True, "-dark")):
            timeline = picture_of(mm.timeline(program, dark=dark))
            cards = picture_of(mm.show_placement(*arguments[:2], plan=plan, memory=32e6, dark=dark))
            # All pictures have one width.
            both = np.concatenate([timeline, without_last_row(cards)])
            matplotlib.image.imsave(folder / f"first{end}.png", both)


def picture_of(view: mm.TimelineView | mm.PlacementView) -> np.ndarray:
    """[height, width, 3], from 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        view.save(file := Path(folder) / "picture.png")
        return matplotlib.image.imread(file)[:, :, :3]


def without_last_row(cards: np.ndarray) -> np.ndarray:
    """The picture of cards in rows, cut in the middle of the blank between the last two rows."""
    blank = (cards == cards[0, 0]).all(axis=(1, 2))
    below = np.flatnonzero(~blank)[-1]  # the lower edge of the last row
    above = np.flatnonzero(blank[:below])[-1]  # just above it
    start = np.flatnonzero(~blank[:above])[-1]  # the lower edge of the row before
    return cards[: (start + above) // 2]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
