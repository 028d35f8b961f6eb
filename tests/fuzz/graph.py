"""Random networks: a graph of layers and operations, given as data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

import mmnnx as mm
from tests.fuzz.layers import KINDS, PURE

Node = tuple[Any, ...]


class Graph(nnx.Module):
    """A network: node i applies its operation to the results of earlier nodes (0 is the input).

    The operations: ("layer", k, a) is layer k of result a; other nodes may share it. ("remat", k, a) is the
    same, computed again for the backward. ("scan", ks, a) is a loop over layers ks, and ("cond", (k, l), a)
    one of two. ("add", a, b); ("times", a, b); ("where", a, b); ("norm", a), a normalisation with no
    parameters; ("stop", a), through which no gradient goes. The results that nobody uses are summed.

    No condition is about what is nought, or equal, but for rounding: such as the sum of what was centred.
    """

    def __init__(self, nodes, layers, tasks=(), dtype=jnp.float32, *, rngs: nnx.Rngs, **dtypes: Any):
        self.nodes, self.tasks, self.dtype = nodes, tasks, dtype
        self.layers = nnx.List(KINDS[kind](rngs=rngs, dtype=dtype, **dtypes) for kind in layers)

    def apply(self, node, results):
        match node:
            case ("layer", k, a):
                return self.layers[k](results[a])
            case ("remat", k, a):
                return nnx.remat(lambda layer, x: layer(x))(self.layers[k], results[a])
            case ("scan", ks, a):
                return jax.lax.scan(lambda x, _: (self.in_turn(ks, x), None), results[a], length=2)[0]
            case ("cond", (k, l), a):
                return jax.lax.cond(results[a][0, 0] > 0.1, self.layers[k], self.layers[l], results[a])
            case ("add", a, b):
                return results[a] + results[b]
            case ("times", a, b):
                return results[a] * jnp.tanh(results[b])
            case ("where", a, b):
                return jnp.where(results[a] > results[b] + 0.1, jnp.sin(results[a]), results[b])
            case ("norm", a):
                centred = results[a] - jnp.mean(results[a], axis=-1, keepdims=True)
                return centred / jnp.sqrt(1.0 + jnp.mean(centred**2, axis=-1, keepdims=True))
            case ("stop", a):
                return jax.lax.stop_gradient(results[a])
        raise ValueError(node)

    def in_turn(self, ks, x):
        for k in ks:
            x = jnp.tanh(x + self.layers[k](x))
        return x

    def __call__(self, x):
        results, used = [x.astype(self.dtype)], set()
        for i, node in enumerate(self.nodes):
            task = self.tasks[i] if self.tasks else None
            used.update(inputs(node))
            if task is None:
                results.append(self.apply(node, results))
            else:
                results.append(
                    mm.task(lambda self, node=node, r=tuple(results): self.apply(node, r), task=task)(self)
                )
        return sum(result for i, result in enumerate(results) if i not in used)


def inputs(node: Node) -> tuple[int, ...]:
    """The results that a node reads."""
    return node[1:] if node[0] in ("add", "times", "where", "norm", "stop") else node[2:]


def layers_of(node: Node) -> tuple[int, ...]:
    """The layers that a node has."""
    if node[0] in ("layer", "remat"):
        return (node[1],)
    return node[1] if node[0] in ("scan", "cond") else ()


OPERATIONS = ("layer", "add", "times", "norm")
MORE_OPERATIONS = (*OPERATIONS, "remat", "scan", "cond", "where", "stop")


@st.composite
def graphs(draw, kinds=("tanh",), operations=OPERATIONS, most=5):
    """(nodes, kind of each layer): every layer is used at least once, some more often.

    There are at most so many layers, and so many other nodes.
    """
    layers = tuple(draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=most)))
    pure = [k for k, kind in enumerate(layers) if kind in PURE]
    extra = draw(st.lists(st.sampled_from(operations), max_size=most))
    order = draw(st.permutations([*range(len(layers)), *extra]))
    nodes = []
    for i, what in enumerate(order):
        # Mostly the newest results, so that chains grow deep; sometimes one from long before, to skip over
        # stages.
        earlier = lambda i=i: draw(st.integers(max(0, i - 1), i) | st.integers(0, i))
        if isinstance(what, int):
            nodes.append(("layer", what, earlier()))
        elif what in ("layer", "remat"):
            nodes.append((what, draw(st.integers(0, len(layers) - 1)), earlier()))
        elif what in ("scan", "cond") and len(pure) > 1:
            nodes.append((what, tuple(draw(st.permutations(pure))[:2]), earlier()))
        elif what in ("norm", "stop"):
            nodes.append((what, earlier()))
        elif what in ("scan", "cond"):
            nodes.append(("norm", earlier()))
        else:
            nodes.append((what, earlier(), earlier()))
    return tuple(nodes), layers
