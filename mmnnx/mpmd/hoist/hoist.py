"""What leaves the microbatch loop: reductions of gradients over a data axis, gathers of sharded weights."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import NamedSharding

from mmnnx.mpmd.hoist.gathers import hoist_gathers
from mmnnx.mpmd.hoist.reductions import hoist_reductions
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.placement import Placed


def hoist(placed: Placed, given: Mapping[Var, NamedSharding | None]) -> Placed:
    """Takes out of microbatch loops what is done once for all microbatches.

    Args:
      placed: the function.
      given: the shardings of its inputs.

    Returns:
      The function with its loops replaced, and where all that is new runs.
    """
    own = Placed(placed.nodes, placed.placement.copy())
    return hoist_gathers(hoist_reductions(own, given), given)
