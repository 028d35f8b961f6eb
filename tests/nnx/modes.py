"""Where a function of these tests runs, and how it treats NNX objects."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import pipeline


@dataclasses.dataclass
class Place:
    """A jit, and where the state is that it is given.

    Attributes:
      jit, shard_map: `mm.jit` and `mm.shard_map`, or what they stand for.
      tasks: two tasks, if state is placed on them.
    """

    jit: Callable
    shard_map: Callable
    tasks: list[mm.Task]
    _homes: list[tuple[nnx.Variable, Sharding]] = dataclasses.field(default_factory=list)

    def put(self, *trees: Any) -> Any:
        """The same NNX objects, their Variables in turns on the two tasks, if there are any."""
        variables = [v for _, v in nnx.iter_graph(trees, graph=True) if isinstance(v, nnx.Variable)]
        for n, variable in enumerate(variables if self.tasks else ()):
            home = NamedSharding(self.tasks[n % 2].to_mesh(), P())
            variable.set_raw_value(jax.device_put(variable.get_raw_value(), home))  # of a tree, each array
            self._homes.append((variable, home))
        return trees if len(trees) > 1 else trees[0]

    def check(self) -> None:
        """Fails if a Variable is not where it was put. (Scalars may be on every mesh.)"""
        for variable, home in self._homes:
            for x in jax.tree.leaves(variable.get_raw_value()):
                assert not np.ndim(x) or x.sharding.device_set == home.device_set, f"{variable} was at {home}"


# Under nnx.jit a test is checked, rather than what it tests.
@pytest.fixture(params=[pytest.param("nnx", marks=pytest.mark.slow), "alone", "multimesh", "placed"])
def place(request):
    """Nothing current; a MultiMesh current; state placed on two tasks of it."""
    mesh, tasks = pipeline(2, 2)
    with mesh if request.param in ("multimesh", "placed") else contextlib.nullcontext():
        own = (nnx.jit, nnx.shard_map) if request.param == "nnx" else (mm.jit, mm.shard_map)
        place = Place(*own, tasks if request.param == "placed" else [])
        yield place
        place.check()


GRAPH = dict(graph=True, graph_updates=True)
FUNCTIONAL = dict(graph=True, graph_updates=False)
TREE = dict(graph=False, graph_updates=False)

in_every_style = pytest.mark.parametrize(
    "style", [GRAPH, FUNCTIONAL, TREE], ids=["graph", "functional", "tree"]
)
without_updates = pytest.mark.parametrize("style", [FUNCTIONAL, TREE], ids=["functional", "tree"])
