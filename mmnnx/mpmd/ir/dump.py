"""`MMNNX_DUMP=FOLDER` writes what each stage handed on, for each function that is split, as text to diff.

A function has a folder of its own in FOLDER, numbered in the order in which functions are split, and a file
for each stage, numbered in the order of the stages. A variable has one name in all files of a function.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax

from mmnnx.mpmd.ir.listing import Names

STAGES = ("frontend", "divide", "inline", "place", "hoist", "partition", "schedule", "emit", "compile")

_numbers = itertools.count()


class Dump:
    """Where the stages of one function are written to; nowhere, if `folder` is None."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.names = Names()

    @classmethod
    def of(cls, function_name: str) -> Dump:
        """The dump of a function, as the environment says."""
        root = os.environ.get("MMNNX_DUMP")
        if not root:
            return cls(None)
        process = [f"process{jax.process_index()}"] if jax.process_count() > 1 else []
        name = re.sub(r"\W+", "_", function_name).strip("_")
        folder = Path(root, *process, f"{next(_numbers):03d}-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def write(self, stage: str, text: Callable[[Names], str]) -> None:
        """Writes what a stage handed on; `text` puts it into words, with these names of variables."""
        if self.folder is not None:
            path = self.folder / f"{STAGES.index(stage) + 1}-{stage}.txt"
            path.write_text(text(self.names).rstrip() + "\n", encoding="utf-8")
