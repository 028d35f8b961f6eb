"""The lock of a folder that one process writes to."""

from __future__ import annotations

from pathlib import PurePath

from filelock import FileLock, Timeout

NAME = ".lock"


class NoLock:
    """What stands for the lock of a folder in a bucket, where nothing can be locked."""

    def release(self) -> None:
        """Does nothing."""


def claim(folder: PurePath) -> FileLock | None:
    """Locks a folder, which must exist, until the lock is released or this process ends in any way.

    Returns:
      The lock; None if it is held already, in this process or another, on any host that sees the folder.
    """
    lock = FileLock(folder / NAME, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock
