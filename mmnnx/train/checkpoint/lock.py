"""The lock of a folder that one process writes to."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

NAME = ".lock"


def claim(folder: Path) -> FileLock | None:
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
