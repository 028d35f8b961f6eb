"""Arguments that a call uses up: refused where that would take another one along, or where they are gone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mmnnx.mpmd.ir.equations import is_var
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.runtime.bound_program import BoundProgram


def check_shared(leaves: Sequence[Any], donated: Sequence[bool], names: Sequence[str]) -> None:
    """Refuses an array that is donated as one argument and given as another as well.

    Raises:
      ValueError: names both arguments.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return
    first: dict[int, int] = {}
    for n, x in enumerate(leaves):
        # What this process has no part of may be one array for several.
        if isinstance(x, jax.Array) and x.sharding.addressable_devices:
            m = first.setdefault(id(x), n)
            if m != n and (donated[m] or donated[n]):
                raise ValueError(
                    f"{names[m]} and {names[n]} are one array, and donating it would take both: "
                    "copy one of them (jnp.copy), or do not donate it"
                )


class DonatedArguments:
    """Which arguments of a program are gone after a call.

    Args:
      bound: the program.
      leaves: arguments like those that it will be called with.
    """

    def __init__(self, bound: BoundProgram, leaves: Sequence[Any]):
        self._donated, self._names = bound.donated, bound.record.names()
        returned = {v for v in bound.flat.outvars if is_var(v)}
        # An array of which this process has nothing is one object for all calls, and cannot be used up.
        placed = [(n, x.sharding) for n, x in enumerate(leaves) if is_committed(x)]
        absent = {n for n, sharding in placed if not sharding.addressable_devices}
        donated = [n for n, d in enumerate(self._donated) if d and n not in absent]
        self._used_up = [n for n in donated if bound.flat.invars[n] not in returned]

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuses arguments that an earlier call has used up, or that donation would take along.

        Raises:
          ValueError: names the argument.
        """
        if self._used_up:
            check_shared(leaves, self._donated, self._names)
        for n, x in enumerate(leaves):
            if _is_array(type(x)) and x.is_deleted():
                raise ValueError(
                    f"{self._names[n]} was donated to an earlier call and is gone: "
                    "use the value that call returned, or do not donate it"
                )

    def delete(self, leaves: Sequence[Any]) -> None:
        """Deletes those that no result took over the buffer of."""
        for n in self._used_up:
            x = leaves[n]
            if _is_array(type(x)) and not x.is_deleted():
                x.delete()


# Whether instances of a class are arrays. To ask `isinstance` of each takes twice as long.
_is_array: Callable[[type], bool] = functools.cache(lambda cls: issubclass(cls, jax.Array))
