"""Whether all processes see one folder: each writes its own part of a checkpoint there."""

from __future__ import annotations

import secrets
import time

import jax
from etils.epath import Path as FilePath

from mmnnx.train.checkpoint.agreement import all_or_none, exchange
from mmnnx.train.checkpoint.errors import CheckpointError
from mmnnx.train.checkpoint.paths import in_bucket

PATIENCE = 20.0
"""Seconds after which a network file system should show what another host has written."""


def check_shared(folder: FilePath) -> None:
    """Checks that what process 0 writes to a folder is there for all. Every process must call it.

    Raises:
      CheckpointError: in every process, if it is not, or if the folder cannot be written.
    """
    if jax.process_count() == 1 or in_bucket(folder):
        return
    mark, here = folder / f".shared-{exchange(secrets.token_hex(8))[0]}", jax.process_index()
    try:
        with all_or_none():
            if here == 0:
                _touch(mark)
        with all_or_none():
            if not _appears(mark):
                raise CheckpointError(
                    f"{folder} of this host is not that of process 0, and every process writes its part of a "
                    "checkpoint: choose a folder on a disk that all hosts share, or one in a bucket (gs://)"
                )
    finally:
        if here == 0:
            mark.unlink(missing_ok=True)


def _touch(mark: FilePath) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise CheckpointError(f"{mark.parent} cannot be written ({error.strerror})") from error


def _appears(mark: FilePath) -> bool:
    end = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
