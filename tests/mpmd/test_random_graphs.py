"""Random small networks with random homes: whatever is placed wherever, the answer is that of one device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from tests import models
from tests.fuzz.graph import Graph, graphs
from tests.fuzz.layers import WIDTH
from tests.mpmd.parity import MOMENTUM, assert_parity, pipeline
from tests.slow import examples


def check(graph, stages, data, scoped):
    nodes, layers = graph
    mesh, tasks = pipeline(stages)
    homes = data.draw(
        st.lists(st.integers(0, stages - 1), min_size=len(layers), max_size=len(layers)), label="homes"
    )
    placement = mm.TaskSharding({mm.path("layers", i): tasks[home] for i, home in enumerate(homes)})
    scopes = ()
    if scoped:
        choice = st.none() | st.sampled_from(tasks)
        scopes = tuple(data.draw(st.lists(choice, min_size=len(nodes), max_size=len(nodes)), label="scopes"))
    loops = [(None, None, {}), (2, "1f1b", {}), (2, "gpipe", {}), (1, "1f1b", {"per_call": 3}), (2, None, {})]
    microbatch, schedule, options = data.draw(st.sampled_from(loops), label="loop")
    assert_parity(
        models.make(Graph, nodes, layers, scopes),
        models.squared_error,
        models.vectors(rows=6, features_in=WIDTH, features_out=WIDTH),
        placement,
        mesh=mesh,
        microbatch=microbatch,
        schedule=schedule,
        optimizer=MOMENTUM,
        steps=1,
        **options,
    )


@examples(10)
@given(graph=graphs(), stages=st.integers(2, 4), data=st.data())
def test_random_homes(graph, stages, data):
    check(graph, stages, data, scoped=False)


@examples(10)
@given(graph=graphs(), stages=st.integers(2, 3), data=st.data())
def test_random_homes_and_scopes(graph, stages, data):
    """Scopes say where some nodes are computed, whatever the homes of the state that they use."""
    check(graph, stages, data, scoped=True)
