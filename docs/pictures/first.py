"""Makes the picture of the first page: `python docs/pictures/first.py [FILE]`, on any machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np
from draw import FOLDER, step

import mmnnx as mm


def main(file: Path) -> None:
    """A small language model on four stages of two devices: a step under 1F1B, over what each stage holds."""
    mesh, arguments, train_step = step(2)
    with mesh:
        views = [mm.timeline(train_step.program(*arguments)), mm.show_placement(*arguments[:2])]
    # All pictures have one width.
    matplotlib.image.imsave(file, np.concatenate([picture_of(view) for view in views]))


def picture_of(view: mm.TimelineView | mm.PlacementView) -> np.ndarray:
    """[height, width, 3], from 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        view.save(file := Path(folder) / "picture.png")
        return matplotlib.image.imread(file)[:, :, :3]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER / "first.png")
