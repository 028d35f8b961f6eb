"""Minimum cuts, by scipy's maximum flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

UNBOUNDED = 2**30  # scipy computes flows in int32


def sink_side(num_nodes: int, edges: Sequence[tuple[int, int, int]]) -> set[int]:
    """Nodes on the sink's side of a minimum cut between node 0 (source) and node 1 (sink).

    Of several minimum cuts it takes the one nearest the sink.

    Args:
      num_nodes: number of nodes, source and sink included.
      edges: (from, to, capacity); capacity -1 for an edge that must not be cut.
    """
    from scipy.sparse import csr_matrix  # slow to import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    capacity: dict[tuple[int, int], int] = {}
    for u, v, c in edges:
        capacity[u, v] = -1 if -1 in (c, capacity.get((u, v))) else capacity.get((u, v), 0) + c
    finite = sum(c for c in capacity.values() if c > 0)
    scale = max(1, -(-finite // (UNBOUNDED // 2)))
    caps = np.array([UNBOUNDED if c < 0 else -(-c // scale) for c in capacity.values()], np.int32)
    rows, cols = zip(*capacity)
    graph = csr_matrix((caps, (rows, cols)), shape=(num_nodes, num_nodes))
    flow = maximum_flow(graph, 0, 1).flow
    residual = graph - flow
    residual.data = (residual.data > 0).astype(np.int8)
    residual.eliminate_zeros()
    reaches_sink = breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)
    return {int(n) for n in reaches_sink} - {1}
