"""The minimum cut against every other cut there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmnnx.mpmd.place.min_cut import SINK, sink_side

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
def graphs(draw):
    """(number of nodes, edges): parallel, antiparallel and forbidden edges, edges without capacity or of more
    bytes than 32 bits count."""
    num_nodes = draw(st.integers(2, 7))
    node = st.integers(0, num_nodes - 1)
    capacity = st.one_of(st.integers(0, 4), st.integers(-1, 50), st.integers(-1, 2**40))
    edge = st.tuples(node, node, capacity).filter(lambda e: e[0] != e[1])
    return num_nodes, draw(st.lists(edge, min_size=1, max_size=16))


@given(graphs())
def test_it_is_the_minimum_cut_nearest_the_sink(graph):
    """Of all cuts of the least cost, the sink's side is what their sink's sides have in common."""
    num_nodes, edges = graph
    least, sides = minimum_cuts(num_nodes, edges)
    assume(sides)
    side = sink_side(num_nodes, edges)
    assert cost(side, edges) == least, sides
    assert side == set.intersection(*sides)


def test_the_cheaper_of_two_edges_is_cut():
    assert sink_side(4, [(0, 2, 3), (2, 3, 2), (3, 1, 5)]) == {3}
    assert sink_side(4, [(0, 2, 2), (2, 3, 3), (3, 1, 5)]) == {2, 3}


def test_flow_that_goes_another_way_after_all():
    """The shortest path, over 2 and 3, comes first. Then 7 needs the edge from 3, and 2 has another one."""
    ways = [(0, 2, 3, 1), (2, 4, 5, 1), (0, 6, 7, 3)]
    assert sink_side(8, [(u, v, 1) for way in ways for u, v in itertools.pairwise(way)]) == set()


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


def test_of_terabytes_every_byte_counts():
    assert sink_side(3, [(0, 2, 2**42 + 1), (2, 1, 2**42)]) == set()
    assert sink_side(3, [(0, 2, 2**42), (2, 1, 2**42 + 1)]) == {2}


def test_many_forbidden_edges_are_not_cut():
    fan = range(2, 42)
    edges = [(0, n, -1) for n in fan] + [(n, 42, 1) for n in fan] + [(42, 43, -1), (43, 42, -1), (43, 1, 100)]
    assert sink_side(44, edges) == {42, 43}
