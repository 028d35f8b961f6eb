"""What the processes of a run do as one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator

import mmnnx as mm
from mmnnx import _compat
from mmnnx.train.errors import ToldElsewhere, UserError
from mmnnx.train.local_processes import LAUNCHER

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_HOUR = 3600 * 1000  # ms; that a process is gone is found out elsewhere, and much sooner
_numbers = itertools.count()


def join(cluster: bool) -> None:
    """Joins the other processes of the run, if the environment says that there are any.

    Where the user started this process, it says at which address it hands arrays to the others.

    Args:
      cluster: whether to ask Slurm, Open MPI and the others that JAX knows.

    Raises:
      UserError: where what is said of the processes is not enough, or makes no sense.
    """
    if not cluster and not any(name in os.environ for name in VARIABLES):
        return
    if LAUNCHER not in os.environ:  # else all that listens does so on loopback
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mmnnx: %(message)s"))
        log = logging.getLogger("mmnnx")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        mm.initialize()
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return _compat.own_process()[0] == 0


@contextlib.contextmanager
def as_one(*errors: type[Exception]) -> Iterator[None]:
    """An error of these types that one process raises inside is a UserError in every process, of which one
    tells it: the first that raised it.

    Every process goes through it; none leaves it before all have come.

    >>> with as_one(UserError):
    ...     corpus = load_corpus(path)
    """
    said = ""
    try:
        yield
    except errors as error:
        if _compat.own_process()[1] == 1:
            raise
        said = str(error)
    number, count = _compat.own_process()
    if count == 1:
        return
    store, key = _compat.key_value_store(), f"mmnnx/errors/{next(_numbers)}"
    if said:
        store.key_value_set(f"{key}/{number}", said)
    store.wait_at_barrier(key, _HOUR)
    if found := {int(path.rpartition("/")[2]): text for path, text in store.key_value_dir_get(f"{key}/")}:
        teller = min(found)
        raise (UserError if teller == number else ToldElsewhere)(found[teller])
