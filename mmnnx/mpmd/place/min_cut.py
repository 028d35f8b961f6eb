"""Minimum cuts, by Dinic's algorithm for the maximum flow (Soviet Math. Doklady 11, 1970).

scipy has one, which takes longer to import (0.2 s, in every process) than the cuts of a large model take
here, and has capacities of 32 bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

SOURCE, SINK = 0, 1

Capacities = list[dict[int, int]]  # [from][to]: how much more can flow, or flow back


def sink_side(num_nodes: int, edges: Sequence[tuple[int, int, int]]) -> set[int]:
    """Nodes on the sink's side of a minimum cut between node 0 (source) and node 1 (sink).

    Of several minimum cuts it takes the one nearest the sink.

    Args:
      num_nodes: number of nodes, source and sink included.
      edges: (from, to, capacity); capacity -1 for an edge that must not be cut.
    """
    unbounded = 1 + sum(c for _, _, c in edges if c > 0)  # more than all others together
    left: Capacities = [{} for _ in range(num_nodes)]
    for u, v, c in edges:
        left[u][v] = left[u].get(v, 0) + (unbounded if c < 0 else c)
        left[v].setdefault(u, 0)
    while SOURCE in (distance := _distances(left)):
        _block(left, distance)
    return {*distance} - {SINK}


def _distances(left: Capacities) -> dict[int, int]:
    """How many edges each node is away from the sink; none of those from where nothing can flow there."""
    distance, queue = {SINK: 0}, deque([SINK])
    while queue:
        v = queue.popleft()
        for u in left[v]:
            if u not in distance and left[u][v]:
                distance[u] = distance[v] + 1
                queue.append(u)
    return distance


def _block(left: Capacities, distance: Mapping[int, int]) -> None:
    """Sends along shortest paths what can flow there, until each has an edge that is full."""
    ahead = {u: [v for v in left[u] if distance.get(v) == d - 1] for u, d in distance.items()}
    path = [SOURCE]
    while path:
        u = path[-1]
        if u == SINK:
            steps = list(itertools.pairwise(path))
            flow = min(left[a][b] for a, b in steps)
            for a, b in steps:
                left[a][b] -= flow
                left[b][a] += flow
            full = next(n for n, (a, b) in enumerate(steps) if not left[a][b])
            del path[full + 1 :]
        elif not ahead[u]:
            path.pop()
            if path:
                ahead[path[-1]].pop()
        elif left[u][ahead[u][-1]]:
            path.append(ahead[u][-1])
        else:
            ahead[u].pop()
