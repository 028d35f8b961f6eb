"""Random small networks with random homes: whatever is placed wherever, the answer is that of one device."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from tests import models
from tests.mpmd.parity import SGD, assert_parity, pipeline
from tests.slow import examples

WIDTH = 4


class Graph(nnx.Module):
    """A network given as data: node i applies its operation to the results of earlier nodes (0 is the input).

    The operations: ("layer", k, a) linear layer k, which other nodes may share; ("add", a, b); ("times", a,
    b); ("norm", a), a normalisation with no parameters. The results that nobody uses are summed.
    """

    def __init__(self, nodes, layers, tasks=(), *, rngs: nnx.Rngs):
        self.nodes, self.tasks = nodes, tasks
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers))

    def apply(self, node, results):
        match node:
            case ("layer", k, a):
                return jnp.tanh(self.layers[k](results[a]))
            case ("add", a, b):
                return results[a] + results[b]
            case ("times", a, b):
                return results[a] * jnp.tanh(results[b])
            case ("norm", a):
                centred = results[a] - jnp.mean(results[a], axis=-1, keepdims=True)
                return centred / jnp.sqrt(1.0 + jnp.mean(centred**2, axis=-1, keepdims=True))
        raise ValueError(node)

    def __call__(self, x):
        results, used = [x], set()
        for i, node in enumerate(self.nodes):
            task = self.tasks[i] if self.tasks else None
            inputs = node[2:] if node[0] == "layer" else node[1:]
            used.update(inputs)
            if task is None:
                results.append(self.apply(node, results))
            else:
                results.append(
                    mm.task(lambda self, node=node, r=tuple(results): self.apply(node, r), task=task)(self)
                )
        return sum(result for i, result in enumerate(results) if i not in used)


@st.composite
def graphs(draw):
    """(nodes, number of layers): every layer is used at least once, some more often."""
    layers = draw(st.integers(2, 5))
    extra = draw(st.lists(st.sampled_from(["layer", "add", "times", "norm"]), max_size=5))
    order = draw(st.permutations([*range(layers), *extra]))
    nodes = []
    for i, what in enumerate(order):
        # Mostly the newest results, so that chains grow deep; sometimes one from long before, to skip over
        # stages.
        earlier = lambda i=i: draw(st.integers(max(0, i - 1), i) | st.integers(0, i))
        if isinstance(what, int):
            nodes.append(("layer", what, earlier()))
        elif what == "layer":
            nodes.append(("layer", draw(st.integers(0, layers - 1)), earlier()))
        elif what == "norm":
            nodes.append(("norm", earlier()))
        else:
            nodes.append((what, earlier(), earlier()))
    return tuple(nodes), layers


def check(graph, stages, data, scoped):
    nodes, layers = graph
    mesh, tasks = pipeline(stages)
    homes = data.draw(st.lists(st.integers(0, stages - 1), min_size=layers, max_size=layers), label="homes")
    placement = mm.TaskSharding({mm.path("layers", i): tasks[home] for i, home in enumerate(homes)})
    scopes = ()
    if scoped:
        choice = st.none() | st.sampled_from(tasks)
        scopes = tuple(data.draw(st.lists(choice, min_size=len(nodes), max_size=len(nodes)), label="scopes"))
    microbatch, schedule = data.draw(st.sampled_from([(None, None), (2, "1f1b"), (2, "gpipe")]), label="loop")
    assert_parity(
        models.make(Graph, nodes, layers, scopes),
        models.squared_error,
        models.vectors(rows=6, features_in=WIDTH, features_out=WIDTH),
        placement,
        mesh=mesh,
        microbatch=microbatch,
        schedule=schedule,
        optimizer=SGD,
        steps=1,
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
