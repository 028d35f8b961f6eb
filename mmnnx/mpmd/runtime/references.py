"""References (`jax.new_ref`) among the arguments of a call: read before it, written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mmnnx import _compat
from mmnnx.mpmd.runtime.prepare import Run


def around(prepare: Callable[[], Run], numbers: Iterable[int], names: Sequence[str]) -> Callable[[], Run]:
    """What runs a function over arrays, for arguments some of which are references.

    Args:
      prepare: returns the function; what references hold after a call are its last results.
      numbers: which arguments are references.
      names: of all arguments.
    """
    order = tuple(numbers)

    def prepare_around() -> Run:
        run = prepare()

        def run_around(leaves: Sequence[Any]) -> list[Any]:
            references = [leaves[n] for n in order]
            _check_different(references, [names[n] for n in order])
            results = run([_compat.held(x) for x in leaves])
            for reference, x in zip(references, results[len(results) - len(order) :]):
                _compat.hold(reference, x)
            return results[: len(results) - len(order)]

        return run_around

    return prepare_around


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
