"""The folder of a run's checkpoints: their steps, their JSON, and which of them are complete."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import tensorstore as ts

from mmnnx.train.checkpoint.errors import DamagedError
from mmnnx.train.checkpoint.read import open_arrays

STATE = "state"
JSON = ("placement", "data", "config", "metrics")
METADATA = "_CHECKPOINT_METADATA"  # orbax's own file about a step
UNFINISHED = ".orbax-checkpoint-tmp"  # orbax's suffix for a checkpoint that it is writing


def steps_in(folder: FilePath) -> list[int]:
    """The steps of the checkpoints in a folder, earliest first. A folder is named so once it is complete."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def unfinished(folder: FilePath) -> list[str]:
    """The folders of checkpoints whose writing was killed."""
    return sorted(p.name for p in folder.glob(f"*{UNFINISHED}")) if folder.is_dir() else []


def replaced(folder: FilePath) -> str:
    """The end of a message that there is no checkpoint: those set aside, and how to restore them."""
    names = sorted(p.name for p in folder.glob("*.replaced*") if p.is_dir()) if folder.is_dir() else []
    if not names:
        return ""
    step = names[-1].partition(".")[0]
    return f"; {', '.join(names)} was set aside: to restore {names[-1]} rename it to {step}"


def checksum(value: Any) -> int:
    """The CRC-32 of a JSON value."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def read_json(step: FilePath, name: str) -> Any:
    """The content of NAME/NAME.json in a step's folder; None if nothing was saved under that name.

    Raises:
      DamagedError: for a file that is not as it was written.
    """
    sums = _sums(step)
    if name not in sums:
        return None
    file = step / name / f"{name}.json"
    value = _load(file)
    if checksum(value) != sums[name]:
        raise DamagedError(f"{file} is damaged: its checksum is not the one it was written with")
    return value


def is_ours(step: FilePath) -> bool:
    """Whether mmnnx wrote a step's folder: then there is a placement in it."""
    return (step / "placement").exists()


def saved_at(step: FilePath) -> float | None:
    """When a checkpoint was complete, in seconds since 1970."""
    about = _load(step / METADATA)
    nanoseconds = about.get("commit_timestamp_nsecs") if isinstance(about, dict) else None
    return nanoseconds / 1e9 if isinstance(nanoseconds, int) else None


def _sums(step: FilePath) -> Mapping[str, int]:
    if not step.is_dir():
        raise DamagedError(f"there is no checkpoint {step}")
    about = _load(step / METADATA)
    found = about.get("custom_metadata") if isinstance(about, dict) else None
    sums = found.get("checksums") if isinstance(found, dict) else None
    if not isinstance(sums, dict) or "placement" not in sums:
        raise DamagedError(
            f"{step / METADATA} is not that of a checkpoint by mmnnx; what orbax wrote is restored with orbax"
        )
    return sums


def _load(file: FilePath) -> Any:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing: the checkpoint is incomplete, or not by mmnnx") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error


def is_whole(step: FilePath) -> bool:
    """Whether a step's folder is complete: opens every file and reads the end of every chunk, which finds all
    damage except flipped bytes inside a chunk."""
    try:
        for name in JSON:
            read_json(step, name)
        stored = read_json(step, "placement")["state"]
        open_arrays(step / STATE, [tuple(path.split("/")) for path in stored])
        base = {"driver": "file", "path": f"{(step / STATE).absolute()}/"}
        files = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        reads = [files.read(key, byte_range=slice(-1, None)) for key in files.list().result()]
        for read in reads:
            read.result()
    except Exception:
        return False
    return True


def advice(folder: FilePath, damaged: int) -> str:
    """The end of a message about a damaged checkpoint: what to do."""
    for step in reversed([s for s in steps_in(folder) if s != damaged]):
        if is_whole(folder / str(step)):
            return (
                f"The newest good checkpoint in {folder} is that of step {step}: restore it with "
                f"step={step}, or move {folder / str(damaged)} out of the way"
            )
    return f"There is no other good checkpoint in {folder}"


def remove(folder: FilePath, steps: list[int]) -> None:
    """Deletes checkpoints, and what is left of writes and deletions that were killed."""
    for left in list(folder.iterdir()):
        if left.is_dir() and left.name.endswith((".deleted", UNFINISHED)):
            shutil.rmtree(left)
    for step in steps:  # renamed first: a folder named by its step is always complete
        shutil.rmtree((folder / str(step)).rename(folder / f"{step}.deleted"))


def set_aside(folder: FilePath, steps: list[int]) -> None:
    """Renames checkpoints from before the run went back, so that they are not taken for its newest."""
    for step in steps:
        n = 0
        while (to := folder / f"{step}.replaced{n or ''}").exists():
            n += 1
        (folder / str(step)).rename(to)
