"""One process at a time: what is held while a folder is written to."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

NAME = ".lock"


def claim(folder: Path) -> FileLock | None:
    """Holds a folder, which must exist, until the lock is released or this process ends, however that is.

    Returns:
      The lock; None where somebody holds it already, here or in another process of any host that sees it.
    """
    lock = FileLock(folder / NAME, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock
