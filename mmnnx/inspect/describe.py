"""``mm.describe``: where each array of a model lives, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from rich import box
from rich.table import Table

from mmnnx.inspect.cells import cell
from mmnnx.inspect.locations import OWN, Homes
from mmnnx.inspect.model_state import Piece, is_array, list_state
from mmnnx.inspect.rich_output import ShownAsTable
from mmnnx.inspect.units import bytes_text, ranges_text
from mmnnx.sharding.path_filter import path_text
from mmnnx.sharding.placement import TaskSharding

ADVICE = (
    "what is not placed: jit a function that makes it with out_shardings=, or hand it over with "
    "in_shardings=; sharding= shows where it is going to live"
)
OF_THE_WHOLE = f"to see the rule that placed what has {OWN}, describe the whole model inside `with mesh:`"


@dataclass(frozen=True, repr=False)
class Description(ShownAsTable):
    """A table that a notebook shows and `print` prints.

    Attributes:
      pieces: each array, with its path and where it lives.

    Example:
      >>> [piece.placed.home.devices for piece in mm.describe(model.blocks[0]).pieces]
      [(0, 1), (0, 1)]
    """

    pieces: tuple[Piece, ...]

    @property
    def table(self) -> Table:
        """A row for each array."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("path", "array", "task", "devices", "spec", "on each", "why"):
            table.add_column(heading, overflow="fold", justify="right" if heading == "on each" else "left")
        for piece in self.pieces:
            row = [path_text(piece.path), str(piece)]
            if piece.placed is None:
                row += ["", "", "", "", "not placed"]
            else:
                home = piece.placed.home
                size = bytes_text(piece.placed.shard_bytes)
                row += [home.task, ranges_text(home.devices), piece.placed.spec, size, piece.placed.why]
            table.add_row(*map(cell, row))
        advice = []
        if any(piece.placed is None for piece in self.pieces):
            advice.append(ADVICE)
        if any(piece.placed is not None and piece.placed.why == OWN for piece in self.pieces):
            advice.append(OF_THE_WHOLE)
        if advice:
            table.caption, table.caption_justify = "\n".join(advice), "left"
        return table

    def __rich__(self) -> Table:
        return self.table


def describe(x: Any, *, sharding: TaskSharding | None = None) -> Description:
    """Where each array lives, and why: the rule that placed it, or the sharding that it has.

    Call it inside `with MultiMesh(...):` to see the names of tasks, and the rules by which `mm.jit` placed
    what is there. Paths start at `x`: give it the model that was placed, not a part of it. Nothing is
    computed.

    Args:
      x: an NNX object, such as a Module or an `nnx.Optimizer`, real or of `nnx.eval_shape`; a Variable; or an
        array.
      sharding: a TaskSharding that says where state is going to live: with the rule that says so. Its paths
        start at `x`. Default: the arrays' own shardings.

    Raises:
      TypeError: `x` is nothing of that, or `sharding` no TaskSharding.
      PlacementError: state that `sharding` cannot place.

    Example:
      >>> one = mm.describe(model.blocks[0].kernel)  # to print, or for a notebook to show
      >>> with mesh:
      ...     found = mm.describe(model.head, sharding=mm.TaskSharding({...: stages[3]}))
      >>> [piece.placed.why for piece in found.pieces]
      ['rule 0: ...', 'rule 0: ...']
    """
    homes = Homes(sharding)
    if isinstance(x, nnx.Variable) or is_array(x):
        held = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        arrays = [leaf for leaf in jax.tree.leaves(held) if is_array(leaf)]
        found = homes.find([()], x, arrays)
        kind = type(x).__name__ if isinstance(x, nnx.Variable) else "Array"
        return Description(
            tuple(
                Piece((), kind, tuple(a.shape), str(a.dtype), a.size, a.size * a.dtype.itemsize, placed)
                for a, placed in zip(arrays, found)
            )
        )
    if not nnx.graph.is_graph_node(x):
        raise TypeError(f"an NNX object, a Variable or an array is needed, not {type(x).__name__}")
    return Description(list_state(x, homes).pieces)
