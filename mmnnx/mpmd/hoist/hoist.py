"""What leaves the microbatch loop: reductions of gradients over a data axis, gathers of sharded weights."""

from __future__ import annotations

import functools

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.hoist.gathers import hoist_gathers
from mmnnx.mpmd.hoist.reductions import hoist_reductions
from mmnnx.mpmd.ir.listing import placed_text
from mmnnx.mpmd.ir.placement import Placed


def hoist(function: Function, placed: Placed) -> Placed:
    """Takes out of microbatch loops what is done once for all microbatches.

    Args:
      function: the function.
      placed: its nodes, and where they are.

    Returns:
      The nodes with loops replaced, and where all that is new runs.
    """
    given = function.given(placed.flat)
    own = Placed(placed.flat, placed.nodes, placed.placement.copy())
    hoisted = hoist_gathers(hoist_reductions(own, given), given)
    function.dump.write("hoist", functools.partial(placed_text, hoisted, function.meshes.names()))
    return hoisted
