"""Minimum cuts, by scipy's maximum flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

UNBOUNDED = 2**30  # scipy computes flows in int32


def sink_side(num_nodes: int, edges: Sequence[tuple[int, int, int]]) -> set[int]:
    """Nodes on the sink's side of a minimum cut between node 0 (source) and node 1 (sink).

    Of several minimum cuts it takes the one nearest the sink.

    Args:
      num_nodes: number of nodes, source and sink included.
      edges: (from, to, capacity); capacity -1 for an edge that must not be cut.
    """
    finite = sum(c for _, _, c in edges if c > 0)
    scale = max(1, -(-finite // (UNBOUNDED // 2)))
    rows, cols, caps = (np.array(x) for x in zip(*edges))
    caps = np.where(caps < 0, UNBOUNDED, -(-caps // scale)).astype(np.int32)
    # Parallel edges add up; two that must not be cut stay within int32 that way.
    graph = csr_matrix((caps, (rows, cols)), shape=(num_nodes, num_nodes))
    graph.data = np.minimum(graph.data, UNBOUNDED)
    flow = maximum_flow(graph, 0, 1).flow
    residual = graph - flow
    residual.data = (residual.data > 0).astype(np.int8)
    residual.eliminate_zeros()
    reaches_sink = breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)
    return {int(n) for n in reaches_sink} - {1}
