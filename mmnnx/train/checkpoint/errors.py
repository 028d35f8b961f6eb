"""What can be wrong with a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str, ...]


class CheckpointError(ValueError):
    """A checkpoint cannot be saved, or cannot be restored so: the message says why, and what to do.

    Example:
      >>> try:
      ...     Checkpoints("nothing/here").restore({"model": model})
      ... except CheckpointError as error:
      ...     print("refused")
      refused
    """


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written: the message names the file, and the newest good checkpoint.

    Example:
      >>> with Checkpoints("damaged") as checkpoints:
      ...     checkpoints.save(1, {"model": model})
      >>> Path("damaged/1/placement/placement.json").unlink()
      >>> try:
      ...     Checkpoints("damaged").restore({"model": model})
      ... except DamagedError as error:
      ...     print("refused")
      refused
    """


@dataclass(frozen=True)
class Differences:
    """How the state in a checkpoint and the state to restore differ, by path.

    Attributes:
      missing: state that is wanted and not in the checkpoint: the type wanted.
      extra: state of the objects to restore that is only in the checkpoint: the type stored, or the rows of
        it that are left over.
      shapes, dtypes: state in both whose shapes or dtypes differ: (wanted, stored).
    """

    missing: dict[Path, str]
    extra: dict[Path, str]
    shapes: dict[Path, tuple[str, str]]
    dtypes: dict[Path, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes)


class StructureError(CheckpointError):
    """The state to restore has another structure than the checkpoint; nothing was read, nothing changed.

    Example:
      >>> with Checkpoints("other") as checkpoints:
      ...     checkpoints.save(1, {"model": model})
      >>> try:
      ...     checkpoints.restore({"model": nnx.Linear(4, 4, rngs=nnx.Rngs(0))})
      ... except StructureError as error:
      ...     [".".join(path) for path in error.differences.missing]
      ['model.bias', 'model.kernel']
    """

    def __init__(self, message: str, differences: Differences):
        super().__init__(message)
        self.differences = differences
