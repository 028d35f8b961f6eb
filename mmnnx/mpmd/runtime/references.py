"""References (`jax.new_ref`) among the arguments of a call: read before it, written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mmnnx import _compat
from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.runtime.pieces import AroundPieces
from mmnnx.mpmd.runtime.prepare import Prepared


def around_references(
    prepare: Callable[[CompilerOptions], Prepared | AroundPieces], record: Record
) -> Callable[[CompilerOptions], AroundReferences]:
    """What compiles a program over arrays, to be run for arguments some of which are references.

    Args:
      prepare: compiles it.
      record: which arguments are references.
    """
    numbers, names = tuple(record.references), record.names()
    return lambda options: AroundReferences(prepare(options), numbers, names)


class AroundReferences:
    """A compiled program over arrays, for arguments some of which are references.

    Args:
      prepared: the program; what references hold after a call are its last results.
      numbers: which arguments are references.
      names: of all arguments.
    """

    def __init__(self, prepared: Prepared | AroundPieces, numbers: Iterable[int], names: Sequence[str]):
        self.compiled, self.bound = prepared.compiled, prepared.bound
        self.interface = prepared.interface
        self._prepared, self._numbers, self._names = prepared, tuple(numbers), names

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        references = [leaves[n] for n in self._numbers]
        _check_different(references, [self._names[n] for n in self._numbers])
        results = self._prepared([_compat.held(x) for x in leaves])
        count = len(results) - len(references)
        for reference, x in zip(references, results[count:]):
            _compat.hold(reference, x)
        return results[:count]


def put_on_device(leaves: Sequence[Any], device: jax.Device) -> list[Any]:
    """Arguments on a device; of references, others that hold the same."""
    # Given a device alone, JAX would keep a sharding over Explicit axes in the types.
    arrays = jax.device_put([_compat.held(x) for x in leaves], SingleDeviceSharding(device))
    return [jax.new_ref(a) if isinstance(x, jax.Ref) else a for x, a in zip(leaves, arrays)]


def take_back(leaves: Sequence[Any], others: Sequence[Any]) -> None:
    """Has references hold what those of `put_on_device` do, where they were."""
    for x, other in zip(leaves, others):
        if isinstance(x, jax.Ref):
            _compat.hold(x, jax.device_put(_compat.held(other), x.sharding))


def _check_different(references: Sequence[jax.Ref], names: Sequence[str]) -> None:
    first: dict[int, str] = {}
    for reference, name in zip(references, names):
        if (other := first.setdefault(id(reference), name)) != name:
            raise ValueError(f"{other} and {name} are one jax.Ref: pass it once")
