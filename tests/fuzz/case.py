"""A random train step, as data: a model, where it lives, and how it is trained."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.schedule import Stages
from tests import models
from tests.fuzz.graph import MORE_OPERATIONS, Graph, Node, graphs
from tests.fuzz.layers import KINDS, STATEFUL, WIDTH
from tests.mpmd.parity import ADAMW, MOMENTUM
from tests.mpmd.test_every_schedule import ANYWHERE, LOOPING, VEES
from tests.mpmd.test_random_schedules import random_table

ROWS = 4  # of a microbatch
DEVICES = 8

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": ADAMW,
    "momentum": MOMENTUM,
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    "every second": optax.MultiSteps(ADAMW, 2),
    "two rates": optax.partition(
        {True: ADAMW, False: optax.sgd(0.1)}, lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    ),
    "ema": optax.chain(ADAMW, optax.ema(0.9)),
}
DTYPES = ("float32", "bfloat16", "bfloat16 weights")

# How the state of a layer is sharded: the mesh axes of the first and of the last dimension.
STYLES = {
    "replicated": (None, None),
    "rows": ("model", None),
    "columns": (None, "model"),
    "fsdp": ("data", None),
    "fsdp columns": ("data", "model"),
}
LOGICAL = "logical"
ROUTES = ("made", "moved", "moved with optimizer", "moved by in_shardings")


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step.

    Attributes:
      nodes, layers: the model, as for `Graph`.
      meshes: the device numbers of each, and its sizes along "data" and "model".
      tasks: the mesh of each task.
      homes: the task of each layer.
      scopes: the task that each node is in, None for none; empty if no node is in a task.
      styles: how the state of each layer is sharded, one of STYLES; or "logical", by names of its own.
      frozen: the layers that are not trained.
      dtype: one of DTYPES; "bfloat16" has weights of float32.
      microbatches: how many, 0 for no loop.
      schedule: its name, None for the fastest, or a number for a random table.
      per_call: how many microbatches share a call.
      reduce: how the results of microbatches are reduced.
      output: how the outputs of the model are, which the step returns beside its loss; "" if it does not.
      again: whether the loss calls the model twice.
      data: whether the rows of a microbatch are sharded.
      optimizer: one of OPTIMIZERS.
      route: how the model comes to its meshes: made there, moved, or moved with its optimizer
        (by out_shardings or in_shardings).
      donate: whether the step overwrites the old state.
    """

    nodes: tuple[Node, ...]
    layers: tuple[str, ...]
    meshes: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = (((0,), (1, 1)), ((1,), (1, 1)))
    tasks: tuple[int, ...] = (0, 1)
    homes: tuple[int, ...] = ()
    scopes: tuple[int | None, ...] = ()
    styles: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()
    dtype: str = "float32"
    microbatches: int = 0
    schedule: str | int | None = None
    per_call: int = 1
    reduce: str = "mean"
    output: str = ""
    again: bool = False
    data: bool = False
    optimizer: str = "sgd"
    route: str = "made"
    donate: bool = False

    def __repr__(self) -> str:
        """Without what is as usual."""
        given = [
            f"    {field.name}={getattr(self, field.name)!r},"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "\n".join(["Case(", *given, ")"])

    @functools.cached_property
    def placed_tasks(self) -> tuple[mm.Task, ...]:
        found = []
        for number, where in enumerate(self.tasks):
            devices, sizes = self.meshes[where]
            submesh = mm.TaskMesh(devices=devices, axis_sizes=sizes, axis_names=("data", "model"))
            rules = {"in": "data", "out": "model"}
            found.append(mm.Task(f"task{number}", mesh=submesh, logical_axes=rules))
        return tuple(found)

    @functools.cached_property
    def trained(self) -> Any:
        """The NNX filter of what is trained."""
        if not self.frozen:
            return nnx.Param
        return nnx.All(nnx.Param, lambda path, _: path[1] not in self.frozen)

    def make(self, dtype: str | None = None) -> nnx.Module:
        """The model, on one device."""
        dtype = dtype or self.dtype
        scopes = tuple(None if task is None else self.placed_tasks[task] for task in self.scopes)
        return Graph(
            self.nodes,
            self.layers,
            scopes,
            jnp.float32 if dtype == "float32" else jnp.bfloat16,
            param_dtype=jnp.bfloat16 if dtype == "bfloat16 weights" else jnp.float32,
            rngs=nnx.Rngs(0, dropout=1),
        )

    def batch(self, seed: int = 0) -> models.Batch:
        return models.vectors(ROWS * (self.microbatches or 2), WIDTH, WIDTH, seed)

    def shardings(self, model: nnx.Module) -> dict[tuple[Any, ...], NamedSharding]:
        """Where each Variable of the model lives, by path."""
        return {path: sharding for path, _, _, sharding in self._rules(model)}

    def placement(self, model: nnx.Module) -> mm.TaskSharding:
        rules = self._rules(model)
        return mm.TaskSharding({mm.path(*path): (task, spec) for path, task, spec, _ in rules})

    def _rules(self, model: nnx.Module) -> Iterator[tuple[Any, ...]]:
        """For each Variable: its path, its task, the spec that its rule has, and where it lives then."""
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            k = path[1]
            task, style = self.placed_tasks[self.homes[k]], self.styles[k]
            shape = variable.get_raw_value().shape
            devices, sizes = self.meshes[self.tasks[self.homes[k]]]
            names = variable.get_metadata().get("out_sharding") or ()
            if style == LOGICAL:
                given, spec = None, P(*({"in": "data", "out": "model"}[name] for name in names))
            else:
                given = spec = sharded(shape, STYLES[style], dict(zip(("data", "model"), sizes)))
            grid = np.array(jax.devices())[list(devices)].reshape(sizes)
            yield path, task, given, NamedSharding(Mesh(grid, ("data", "model")), spec)


def sharded(shape: tuple[int, ...], style: tuple[str | None, str | None], sizes: dict[str, int]) -> P:
    """The first and the last dimension over their axes, where these divide them."""
    entries: list[str | None] = [None] * len(shape)
    first, last = style
    if len(shape) > 1 and first and shape[0] % sizes[first] == 0:
        entries[0] = first
    if shape and last and shape[-1] % sizes[last] == 0:
        entries[-1] = last
    return P(*entries)


SIZES = [(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


@st.composite
def meshes(draw, count: int):
    """Of one to four devices, side by side, or anywhere, so that they may share some."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=count, max_size=count))
    found, free = [], 0
    anywhere = draw(st.booleans())
    for data, model in sizes:
        n = data * model
        start = free if not anywhere and free + n <= DEVICES else draw(st.integers(0, DEVICES - n))
        found.append((tuple(range(start, start + n)), (data, model)))
        free = start + n
    return tuple(dict.fromkeys(found))


def training(draw, layers: int, microbatches: int, schedule: str | int | None) -> dict[str, Any]:
    """What does not depend on where the model is cut."""
    one = lambda options: draw(st.sampled_from(list(options)))
    shared = [1] if isinstance(schedule, int) else [k for k in range(1, 5) if k == 1 or microbatches % k == 0]
    return dict(
        schedule=schedule,
        per_call=one(shared) if microbatches else 1,
        styles=tuple(one([*STYLES, LOGICAL]) for _ in range(layers)),
        frozen=tuple(k for k in range(1, layers) if one([True, False, False])) if draw(st.booleans()) else (),
        dtype=one(DTYPES),
        microbatches=microbatches,
        reduce=one(["mean", "sum"]) if microbatches else "mean",
        output=one(["", "concat", "last", "max"]),
        again=one([True, False, False]),
        data=bool(microbatches) and draw(st.booleans()),
        optimizer=one(OPTIMIZERS),
        route=one(ROUTES),
        donate=draw(st.booleans()),
    )


@st.composite
def scattered(draw):
    """Any graph, its layers anywhere; some nodes in tasks."""
    nodes, layers = draw(graphs(list(KINDS), MORE_OPERATIONS, most=4))
    places = draw(meshes(draw(st.integers(2, 4))))
    tasks = range(len(places))
    task = st.sampled_from(tasks)
    scopes = ()
    if draw(st.booleans()):
        scopes = tuple(draw(st.lists(st.none() | task, min_size=len(nodes), max_size=len(nodes))))
    microbatches = draw(st.sampled_from([0, 2, 3, 4]))
    schedule = draw(st.sampled_from([None, *ANYWHERE])) if microbatches else None
    return Case(
        nodes,
        layers,
        places,
        tuple(tasks),
        tuple(draw(st.lists(task, min_size=len(layers), max_size=len(layers)))),
        scopes,
        **training(draw, len(layers), microbatches, schedule),
    )


@st.composite
def chains(draw):
    """A chain of stages that lie in a V, go round the meshes, or run in the order of a random table."""
    places = draw(meshes(draw(st.integers(2, 3))))
    count = len(places)
    if count < 2:
        places = (((0,), (1, 1)), ((1,), (1, 1)))
        count = 2
    schedule = draw(st.sampled_from([*LOOPING, *VEES, "random"]))
    around = [*range(count)]
    tasks = around * draw(st.integers(2, 3)) if schedule in LOOPING else around + around[::-1]
    microbatches = draw(st.integers(2, 5))
    if schedule == "dualpipe-v":
        microbatches = max(microbatches, 2 * count)
    if schedule == "random":
        schedule = draw(st.integers(0, 1000))
        tasks = draw(st.permutations(tasks))
    nodes, layers, homes, scopes = [], [], [], []
    for stage in range(len(tasks)):
        first = len(nodes)
        for _ in range(draw(st.sampled_from([1, 1, 2]))):
            kind = st.sampled_from(["layer", "layer", "remat"])
            nodes.append((draw(kind), len(layers), len(nodes)))
            layers.append(draw(st.sampled_from(list(KINDS))))
            homes.append(stage)
        if draw(st.booleans()):
            nodes.append((draw(st.sampled_from(["add", "times", "where"])), len(nodes), first))
        scopes += [stage] * (len(nodes) - first)
    return Case(
        tuple(nodes),
        tuple(layers),
        places,
        tuple(tasks),
        tuple(homes),
        tuple(scopes),
        **training(draw, len(layers), microbatches, schedule),
    )


def cases() -> st.SearchStrategy[Case]:
    """Random train steps."""
    return scattered() | scattered() | chains()


def loop_options(case: Case) -> dict[str, Any]:
    """The keywords of `mm.microbatch` that say in which order it runs."""
    if not isinstance(case.schedule, int):
        return {"schedule": case.schedule, "per_call": case.per_call}
    rng = random.Random(case.schedule)
    number = {mesh: n for n, mesh in enumerate(dict.fromkeys(case.tasks))}
    stages = Stages.chain([number[mesh] for mesh in case.tasks])
    cut = [rng.random() < 0.5 for _ in case.tasks]
    in_order = {home for kind, home in zip(case.layers, case.homes) if kind in STATEFUL}
    if case.output in ("last", "max"):  # made of that of the microbatch before
        in_order.add(max(case.homes))
    return {"custom_schedule": random_table(rng, stages, case.microbatches, cut, in_order)}
