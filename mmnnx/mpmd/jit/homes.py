"""State goes back to where it lived: what `nnx.update` gives a Variable from the host has no place.

After a call each Variable remembers where its arrays live, and so where the next values belong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.runtime.put import put
from mmnnx.sharding.divided_array import PiecewiseSharding, divide_array

Home = tuple[tuple[int, ...], NamedSharding | PiecewiseSharding]  # the shape of what lives there, and how


def note_homes(variables: Iterable[nnx.Variable]) -> None:
    """Has Variables remember where their arrays live."""
    for variable in variables:
        homes = tuple(map(_home, jax.tree.leaves(variable.get_raw_value())))
        if any(homes):
            _compat.set_note(variable, homes)


def bring_home(variables: Iterable[nnx.Variable]) -> bool:
    """Moves unplaced arrays to where arrays of the same shape lived in their Variable.

    What somebody has put somewhere stays there.

    Returns:
      Whether any were moved.
    """
    moved = False
    for variable in variables:
        if (homes := _compat.note(variable)) is None:
            continue
        leaves, tree = jax.tree.flatten(variable.get_raw_value())
        if len(leaves) == len(homes) and any(map(_is_away, leaves, homes)):
            found = [put_home(x, home[1]) if _is_away(x, home) else x for x, home in zip(leaves, homes)]
            variable.set_raw_value(jax.tree.unflatten(tree, found))
            moved = True
    return moved


def is_homeless(x: Any) -> bool:
    """Whether a value is an array that is unplaced."""
    if isinstance(x, jax.Array):
        return not (is_committed(x) or isinstance(x, jax.core.Tracer))
    return isinstance(x, np.ndarray | np.generic)


def _home(x: Any) -> Home | None:
    placed = is_committed(x) and isinstance(x.sharding, NamedSharding | PiecewiseSharding)
    return (x.shape, x.sharding) if placed else None


def put_home(x: Any, home: NamedSharding | PiecewiseSharding) -> jax.Array:
    """An array with the sharding of placed state."""
    return put(x, home) if isinstance(home, NamedSharding) else divide_array(x, home, put)


def _is_away(x: Any, home: Home | None) -> bool:
    return home is not None and is_homeless(x) and x.shape == home[0]
