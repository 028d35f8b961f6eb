"""The folder of a run's checkpoints: their steps, their JSON, and which of them are complete."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import tensorstore as ts
from etils.epath import Path as FilePath
from orbax.checkpoint import path as orbax_path

from mmnnx.train.checkpoint.errors import CheckpointError, DamagedError
from mmnnx.train.checkpoint.paths import in_bucket, kvstore
from mmnnx.train.checkpoint.read import open_arrays

STATE = "state"
JSON = ("placement", "data", "config", "metrics")
METADATA = "_CHECKPOINT_METADATA"  # orbax's own file about a step
UNFINISHED = orbax_path.atomicity.TMP_DIR_SUFFIX
COMMIT = orbax_path.atomicity.COMMIT_SUCCESS_FILE
DELETED = ".deleted"


def listed(folder: FilePath) -> list[FilePath]:
    """What is in a folder; nothing if there is no such folder.

    Raises:
      CheckpointError: for a bucket that cannot be listed, as without credentials.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except Exception as error:  # of many types
        if in_bucket(folder):
            raise CheckpointError(f"{folder} cannot be listed: {error}") from error
        raise


def steps_in(folder: FilePath) -> list[int]:
    """The steps of the checkpoints in a folder, earliest first.

    A folder is named by its step once it is complete; in a bucket, where nothing is renamed at once, it is
    complete once orbax has written COMMIT into it.
    """
    return sorted(int(p.name) for p in listed(folder) if p.name.isdecimal() and _is_complete(p))


def _is_complete(step: FilePath) -> bool:
    return (step / COMMIT).exists() if in_bucket(step) else step.is_dir()


def unfinished(folder: FilePath) -> list[FilePath]:
    """The folders of checkpoints whose writing was killed, or in a bucket their deletion."""
    return [
        p
        for p in listed(folder)
        if p.name.endswith(UNFINISHED) or (in_bucket(p) and p.name.isdecimal() and not _is_complete(p))
    ]


def replaced(folder: FilePath) -> str:
    """The end of a message that there is no checkpoint: those set aside, and how to restore them."""
    names = [p.name for p in listed(folder) if ".replaced" in p.name and p.is_dir()]
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
        files = ts.KvStore.open({"driver": "ocdbt", "base": kvstore(step / STATE)}).result()
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


def clear(folder: FilePath) -> None:
    """Deletes what is left of writes and deletions that were killed; nothing may be writing to the folder."""
    deleted = [p for p in listed(folder) if p.name.endswith(DELETED) and p.is_dir()]
    for left in [*deleted, *unfinished(folder)]:
        left.rmtree()


def remove(folder: FilePath, steps: list[int]) -> None:
    """Deletes checkpoints; each is first made one that is not complete."""
    for step in steps:
        old = folder / str(step)
        if in_bucket(old):
            (old / COMMIT).unlink()
        else:
            old = old.rename(folder / f"{step}{DELETED}")
        old.rmtree()


def set_aside(checkpoint: FilePath) -> FilePath:
    """Renames a checkpoint from before the run went back, so that it is not taken for its newest.

    Returns:
      What it is now.
    """
    n = 0
    while (to := checkpoint.with_name(f"{checkpoint.name}.replaced{n or ''}")).exists():
        n += 1
    return checkpoint.rename(to)
