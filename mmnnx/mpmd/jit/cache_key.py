"""Cache keys of traces and programs: what each depends on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from mmnnx import _compat
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.jit.argument_types import avals_of
from mmnnx.mpmd.place.options import fusing, recomputing
from mmnnx.sharding.logical import autosharding
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.registered_tasks import registered_rules, registrations
from mmnnx.sharding.task_scope import ignoring


def trace_key(tree: Any, static: Any, leaves: Sequence[Any]) -> Any:
    """What a trace depends on: structure, static arguments, surroundings, shapes and dtypes."""
    return (tree, static, _around(registered_rules()), *avals_of(leaves))


def program_key(tree: Any, static: Any, leaves: Sequence[Any], registered: Hashable = None) -> Any:
    """What a program depends on: all that a trace does, placed state, and where the arguments live.

    Args:
      registered: tasks and placed state. Default: all of them.
    """
    around = _around(registered or registrations())
    return (tree, static, around, *map(_placed_aval, leaves, avals_of(leaves)))


def surroundings() -> Any:
    """What a call depends on beside its arguments: the mesh, tasks and their state, contexts, configuration.

    Of placed state it has all: whose of it a function has is known only once that is traced.
    """
    return _around(registrations())


def _around(registered: Hashable) -> Any:
    contexts = ignoring.get(), recomputing.get(), fusing.get(), autosharding.get()
    return current_multimesh(), registered, contexts, _compat.context_mesh(), _compat.trace_context()


def with_shardings(leaves: Sequence[Any], shardings: Mapping[int, Sharding]) -> list[Any]:
    """The arguments, with a type and sharding in the place of each whose sharding is given, by number."""
    moved = list(leaves)
    for n, sharding in shardings.items():
        (aval,) = avals_of([leaves[n]], typed=False)
        moved[n] = jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type, is_ref=aval.is_ref
        )
    return moved


def _placed_aval(x: Any, aval: jax.ShapeDtypeStruct) -> Any:
    placed = isinstance(x, jax.ShapeDtypeStruct) or is_committed(_compat.held(x))
    return (aval, x.sharding) if placed else aval
