"""The minimum cut against every other cut there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmnnx.mpmd.place.min_cut import sink_side

SOURCE, SINK = 0, 1
Edge = tuple[int, int, int]


def cost(side: set[int], edges: Sequence[Edge]) -> int | None:
    """What is cut if these nodes are on the sink's side with it; None if that may not be cut."""
    side = side | {SINK}
    cut = [c for u, v, c in edges if u not in side and v in side]
    return None if -1 in cut else sum(cut)


def minimum_cuts(num_nodes: int, edges: Sequence[Edge]) -> tuple[int, list[set[int]]]:
    """(the least cost, every set of nodes on the sink's side that has it), by trying all."""
    inner = range(2, num_nodes)
    sides = [set(s) for n in range(num_nodes - 1) for s in itertools.combinations(inner, n)]
    costs = [(c, s) for s in sides if (c := cost(s, edges)) is not None]
    least = min((c for c, _ in costs), default=-1)
    return least, [s for c, s in costs if c == least]


@st.composite
def graphs(draw, largest: int):
    """(number of nodes, edges): parallel, antiparallel and forbidden edges, edges without capacity."""
    num_nodes = draw(st.integers(2, 7))
    node = st.integers(0, num_nodes - 1)
    capacity = st.one_of(st.integers(0, 4), st.integers(-1, largest))
    edge = st.tuples(node, node, capacity).filter(lambda e: e[0] != e[1])
    return num_nodes, draw(st.lists(edge, min_size=1, max_size=16))


@given(graphs(largest=50))
def test_it_is_the_minimum_cut_nearest_the_sink(graph):
    """Of all cuts of the least cost, the sink's side is what their sink's sides have in common."""
    num_nodes, edges = graph
    least, sides = minimum_cuts(num_nodes, edges)
    assume(sides)
    side = sink_side(num_nodes, edges)
    assert cost(side, edges) == least, sides
    assert side == set.intersection(*sides)


@given(graphs(largest=2**40))
def test_large_capacities_cost_little_exactness(graph):
    """Capacities are rounded up to a 2**29th of their sum: the cut is that near to the least one."""
    num_nodes, edges = graph
    least, sides = minimum_cuts(num_nodes, edges)
    assume(sides)
    found = cost(sink_side(num_nodes, edges), edges)
    assert found is not None, "cuts an edge that must not be cut"
    total = sum(c for _, _, c in edges if c > 0)
    assert least <= found <= least + len(edges) * (total / 2**29 + 1) * (total >= 2**29)


def test_the_cheaper_of_two_edges_is_cut():
    assert sink_side(4, [(0, 2, 3), (2, 3, 2), (3, 1, 5)]) == {3}
    assert sink_side(4, [(0, 2, 2), (2, 3, 3), (3, 1, 5)]) == {2, 3}


def test_of_equal_edges_the_one_nearest_the_sink_is_cut():
    assert sink_side(5, [(0, 2, 7), (2, 3, 7), (3, 4, 7), (4, 1, 7)]) == set()
    assert sink_side(5, [(0, 2, 7), (2, 3, 7), (3, 4, 7), (4, 1, 8)]) == {4}


def test_a_forbidden_edge_is_not_cut():
    """-1 is no small number: the dearest of the others is cut instead."""
    assert sink_side(4, [(0, 2, -1), (2, 3, 10**6), (3, 1, -1)]) == {3}


@pytest.mark.parametrize("edges", [[(2, 3, -1), (2, 3, 4)], [(2, 3, 4), (2, 3, -1)]])
def test_an_edge_forbidden_once_is_forbidden(edges):
    assert sink_side(4, [(0, 2, 100), *edges, (3, 1, 1000)]) == {2, 3}


def test_parallel_edges_add_up():
    assert sink_side(3, [(0, 2, 5), (2, 1, 2), (2, 1, 2)]) == set()
    assert sink_side(3, [(0, 2, 5), (2, 1, 3), (2, 1, 3)]) == {2}


def test_what_does_not_lead_to_the_sink_is_not_on_its_side():
    assert sink_side(5, [(0, 2, 1), (2, 1, 2), (0, 3, 5), (2, 4, 5)]) == {2}


@pytest.mark.parametrize("scale", [2**29, 2**31, 2**33, 2**45])
def test_terabytes_do_not_overflow(scale):
    """Capacities are bytes: those of a large model exceed int32 one by one, and the more so together."""
    edges = [(0, 2, 3 * scale), (2, 3, scale), (3, 1, 2 * scale), (0, 3, -1), (2, 1, scale), (3, 2, 1)]
    least, sides = minimum_cuts(4, edges)
    side = sink_side(4, edges)
    assert side in sides and cost(side, edges) == least


def test_the_upper_bits_of_a_capacity_count():
    assert sink_side(3, [(0, 2, 3 * 2**32 + 1), (2, 1, 2**32 + 1000)]) == set()
    assert sink_side(3, [(0, 2, 2**32 + 1000), (2, 1, 3 * 2**32 + 1)]) == {2}


def test_many_forbidden_edges_do_not_overflow():
    """Each stands for an unbounded capacity; no sum of them may wrap around."""
    fan = range(2, 42)
    edges = [(0, n, -1) for n in fan] + [(n, 42, 1) for n in fan] + [(42, 43, -1), (43, 42, -1), (43, 1, 100)]
    assert sink_side(44, edges) == {42, 43}
