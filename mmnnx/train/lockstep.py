"""What the processes of a run do together: they join at the start, and raise the same errors."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.distributed import transport
from mmnnx.output import current
from mmnnx.train.errors import ReportedElsewhere, UserError
from mmnnx.train.local_processes import LAUNCHER

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_HOUR = 3600 * 1000  # ms; a process that has died is noticed elsewhere, and much sooner
_numbers = itertools.count()


def join(cluster: bool) -> None:
    """Joins the other processes of the run, if environment variables say that there are any.

    If the user started this process, the address at which it sends arrays to the others is logged.

    Args:
      cluster: whether JAX should look for the processes of Slurm, Open MPI and other launchers it knows.

    Raises:
      UserError: if the variables are incomplete or wrong.
    """
    if not cluster and not any(name in os.environ for name in VARIABLES):
        return
    output = current.get()
    usual = output.log_level is None and not output.quiet
    if usual and LAUNCHER not in os.environ:  # otherwise all ports are on loopback
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mmnnx: %(message)s"))
        transport.log.addHandler(handler)
        transport.log.setLevel(logging.INFO)
        transport.log.propagate = False
    try:
        mm.initialize()
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def is_first() -> bool:
    """Whether this process prints and writes for all."""
    return _compat.own_process()[0] == 0


@contextlib.contextmanager
def raise_in_all(*errors: type[Exception]) -> Iterator[None]:
    """Inside, an error of these types in one process is a UserError in every process.

    The first process that raised it reports it. Every process must enter, and none leaves before all have.

    Example:
      >>> with raise_in_all(UserError):
      ...     data = Path("data.txt").exists()
    """
    text = ""
    try:
        yield
    except errors as error:
        if _compat.own_process()[1] == 1:
            raise
        text = str(error)
    number, count = _compat.own_process()
    if count == 1:
        return
    store, key = _compat.key_value_store(), f"mmnnx/errors/{next(_numbers)}"
    if text:
        store.key_value_set(f"{key}/{number}", text)
    store.wait_at_barrier(key, _HOUR)
    if found := {int(path.rpartition("/")[2]): text for path, text in store.key_value_dir_get(f"{key}/")}:
        reporter = min(found)
        raise (UserError if reporter == number else ReportedElsewhere)(found[reporter])
