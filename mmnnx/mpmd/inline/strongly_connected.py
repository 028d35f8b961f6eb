"""The strongly connected components of a graph (Tarjan 1972)."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def strongly_connected_components(needs: Sequence[Collection[int]]) -> list[list[int]]:
    """The components, each after those that it needs; numbers within one are in order.

    Args:
      needs: for each number of a node, the nodes that it has edges to.

    Example:
      >>> strongly_connected_components([{1}, {0, 2}, set()])
      [[2], [0, 1]]
    """
    found: list[list[int]] = []
    number: dict[int, int] = {}  # of each node, in the order of the search
    low: dict[int, int] = {}  # the lowest number on the stack that is reached from a node
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(needs)):
        if root in number:
            continue
        path = [(root, iter(needs[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while path:
            n, left = path[-1]
            following = next(left, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[n])
                if low[n] == number[n]:
                    at = stack.index(n)
                    found.append(sorted(stack[at:]))
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
            elif following not in number:
                number[following] = low[following] = len(number)
                stack.append(following)
                on_stack.add(following)
                path.append((following, iter(needs[following])))
            elif following in on_stack:
                low[n] = min(low[n], number[following])
    return found
