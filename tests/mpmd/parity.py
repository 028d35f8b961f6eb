"""The check that decides whether the core is right: a train step split over meshes does what it does on one
device.

`assert_parity` writes one train step, runs it under `nnx.jit` on one device and under `mm.jit` over the
meshes of a placement, and compares by path the loss, auxiliary outputs, every gradient, every parameter, the
optimizer's state and whatever else the model carries. The whole-batch gradient, without microbatches, is a
third witness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.jit.cache_key import surroundings
from mmnnx.mpmd.runtime.put import own_copy
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.registered_tasks import global_registry

EPSILON = float(np.finfo(np.float32).eps)


def pipeline(
    stages: int, *per_stage: int, axes: Sequence[str] = ("model",)
) -> tuple[mm.MultiMesh, list[mm.Task]]:
    """A MultiMesh of `stages` stages, each a mesh of `per_stage` devices along `axes`; and a task for each
    stage.
    """
    return on_meshes(range(stages), *per_stage, axes=axes)


def on_meshes(
    meshes: Sequence[int], *per_stage: int, axes: Sequence[str] = ("model",)
) -> tuple[mm.MultiMesh, list[mm.Task]]:
    """The same where stage n is on mesh `meshes[n]`, and another one may be there too.

    With too few devices, as on a machine with one GPU, all axes have one device, which is in all meshes.
    """
    sizes, names = (max(meshes) + 1, *per_stage), ("stage", *axes[: len(per_stage)])
    devices = np.array(jax.devices())
    if devices.size < np.prod(sizes):
        mesh = mm.MultiMesh(axis_sizes=(1,) * len(names), axis_names=names, devices=devices[:1])
        found = [dict(mesh=_of_first_device(m, names[1:])) for m in meshes]
    else:
        devices = devices[: np.prod(sizes)].reshape(sizes)
        mesh = mm.MultiMesh(axis_sizes=sizes, axis_names=names, devices=devices)
        found = [dict(mesh_slice={"stage": m}) for m in meshes]
    return mesh, [mm.Task(f"stage{n}", **where) for n, where in enumerate(found)]


def _of_first_device(number: int, axes: Sequence[str]) -> mm.TaskMesh:
    """Meshes of one device with as many axes are one mesh: each has another number of them."""
    names = (*axes, *(f"alone{n}" for n in range(number + 1)))
    return mm.TaskMesh(devices=[0], axis_sizes=(1,) * len(names), axis_names=names)


def place(tasks: Sequence[mm.Task], *paths: Iterable[Any], spec: P | None = P()) -> mm.TaskSharding:
    """A TaskSharding that gives each task the state under its paths; a path is a key or a tuple of keys."""
    rules = {}
    for task, owned in zip(tasks, paths, strict=True):
        for keys in owned:
            rules[mm.path(*(keys if isinstance(keys, tuple) else (keys,)))] = (task, spec)
    return mm.TaskSharding(rules)


def born(make_model: Callable[[], Any], placement: mm.TaskSharding | None) -> Any:
    """The model, each Variable on its own mesh, as if made there; without a placement, an ordinary model."""
    return _made_once((make_model, placement), lambda: _placed(make_model, placement))


def born_with_optimizer(
    make_model: Callable[[], Any],
    placement: mm.TaskSharding | None,
    optimizer: optax.GradientTransformation,
    wrt: Any = nnx.Param,
) -> tuple[Any, nnx.Optimizer]:
    """The model, and its optimizer's state on the same meshes."""

    def make():
        model = _placed(make_model, placement)
        return model, _optimizer_birth(optimizer, wrt)(model)

    return _made_once((make_model, placement, optimizer, wrt), make)


def _placed(make_model: Callable[[], Any], placement: mm.TaskSharding | None) -> Any:
    """The model, of values made before: what draws weights would have to be compiled for each placement."""
    graph_and_state = _made_on_one_device(make_model)
    make = lambda: nnx.merge(*graph_and_state, copy=True)
    return make() if placement is None else mm.jit(make, out_shardings=placement)()


@functools.lru_cache(64)
def _made_on_one_device(make_model: Callable[[], Any]) -> tuple[Any, Any]:
    return nnx.split(make_model())


@functools.lru_cache(64)
def _optimizer_birth(optimizer: optax.GradientTransformation, wrt: Any) -> Callable[[Any], nnx.Optimizer]:
    return mm.jit(lambda model: nnx.Optimizer(model, optimizer, wrt=wrt))


@functools.lru_cache(64)
def _made(key: Any) -> list[Any]:
    """Room for what `_made_once` made."""
    return []


def _made_once(key: Any, make: Callable[[], Any]) -> Any:
    """A copy of what `make` makes, which is shared by all that ask for it first on equal MultiMeshes.

    What is compiled depends on the tasks whose state is there already: a copy has to tell of its own.
    """
    made = _made((key, surroundings()))
    multimesh = current_multimesh()
    registry = global_registry if multimesh is None else multimesh.registry
    if not made:
        nodes = make()
        made[:] = (
            nodes,
            [
                (where, t, [path for path, name in registry._owners[where].items() if name == t.name])
                for where, tasks in registry._placed.items()
                for t in tasks.values()
            ],
        )
    nodes, placed = made
    for entry in placed:
        registry.place(*entry)
    graph, state = nnx.split(nodes)
    return nnx.merge(graph, jax.tree.map(_copy, state))


def _copy(leaf: jax.Array) -> jax.Array:
    return leaf.copy() if isinstance(leaf, mm.DividedArray) else own_copy(leaf)


def values(tree: Any) -> dict[str, np.ndarray]:
    """Every array in a pytree, State or graph node, on the host and by path; PRNG keys as their words."""

    def host(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        value = np.asarray(leaf)
        return value.astype(np.float32) if value.dtype == jnp.bfloat16 else value

    return {
        path: host(jnp.asarray(leaf) if np.isscalar(leaf) else leaf) for path, leaf in arrays(tree).items()
    }


def arrays(tree: Any) -> dict[str, Any]:
    """Every leaf of a pytree, State or graph node by path, where it is."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def differences(got: Any, expected: Any, rtol: float, units: float = 1) -> list[str]:
    """What is not equal, worst first: each leaf by path, how far it is off, and how far it was allowed to be.

    A float leaf may be off by `rtol` of its own largest entry, and never by less than so many units of
    float32 rounding of the largest entry of all: a gradient that is nought by symmetry is what rounding
    leaves of larger terms. All other leaves (counters, keys, tokens) must be the same.
    """
    got, expected = values(got), values(expected)
    if got.keys() != expected.keys():
        return [
            f"missing {sorted(expected.keys() - got.keys())}, "
            f"unexpected {sorted(got.keys() - expected.keys())}"
        ]
    floats = [v for v in expected.values() if np.issubdtype(v.dtype, np.floating) and v.size]
    floor = units * EPSILON * max((float(np.abs(v).max()) for v in floats), default=0.0)
    wrong: list[tuple[float, str]] = []
    for path, want in expected.items():
        have = got[path]
        if have.shape != want.shape or have.dtype != want.dtype:
            wrong.append((np.inf, f"{path}: {have.dtype}{have.shape}, expected {want.dtype}{want.shape}"))
        elif not np.issubdtype(want.dtype, np.floating):
            if not np.array_equal(have, want):
                wrong.append((np.inf, f"{path}: {have}, expected {want}"))
        elif want.size:
            allowed = max(rtol * float(np.abs(want).max()), floor)
            off = float(np.abs(have - want).max())
            if not off <= allowed:
                at = np.unravel_index(np.argmax(np.abs(have - want)), want.shape)
                where = f"{tuple(map(int, at))}: {have[at]} for {want[at]}"
                text = f"{path}: off by {off:.3g}, allowed {allowed:.3g}; at {where}"
                wrong.append((off / allowed if allowed else np.inf, text))
    return [text for _, text in sorted(wrong, key=lambda item: -item[0])]


def assert_same(got: Any, expected: Any, rtol: float = 1e-5, what: str = "values") -> None:
    """Fail with every leaf of `got` that is not that of `expected`."""
    wrong = differences(got, expected, rtol)
    assert not wrong, f"{what} differ in {len(wrong)} leaves:\n  " + "\n  ".join(wrong)


def homes(tree: Any) -> dict[str, Any]:
    """The devices each array of a graph node lives on, by path."""
    return {path: leaf.sharding.device_set for path, leaf in arrays(tree).items()}


def train_step(
    jit: Callable,
    loss_fn: Callable,
    *,
    microbatch: int | None = None,
    schedule: str | None = "1f1b",
    reduce: Any = "mean",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    loop: Mapping[str, Any] | None = None,
    **jit_options: Any,
) -> Callable:
    """The train step of every test here, as a user writes it: (model, optimizer, batch) -> (loss, aux),
    gradients. `loop` are more keywords of `mm.microbatch`.
    """

    @jit(**jit_options)
    def step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)
        if microbatch is not None:
            grad_fn = mm.microbatch(
                grad_fn,
                dim=0,
                size=microbatch,
                argnum=1,
                schedule=schedule,
                reduce=reduce,
                **(loop or {}),
            )
        loss, grads = grad_fn(model, batch)
        optimizer.update(model, grads)
        return loss, grads

    return step


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """What a train step does on one device, step by step.

    Attributes:
      birth: the model's state before the first step.
      steps: after each step: results by what they are.
      whole_batch: loss and gradients of the first step without microbatches, None if they differ by nature.
    """

    birth: Any
    steps: list[dict[str, Any]]
    whole_batch: Any


# An Adam whose epsilon is as large as gradients here: it does not blow rounding up into steps of full size.
ADAMW = optax.adamw(3e-2, eps=1e-1, weight_decay=1e-2)
MOMENTUM = optax.sgd(0.1, momentum=0.9)  # the least that has state of its own


_SHARED: dict[Any, OneDevice] = {}


def on_one_device(
    make_model: Callable[[], nnx.Module], loss_fn: Callable, batch: Any, **options: Any
) -> OneDevice:
    """What `_train_on_one_device` makes of its arguments; tests that ask for the same share it."""
    rows = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    contents = tuple((leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in rows)
    key = (make_model, loss_fn, jax.tree.structure(batch), contents, *sorted(options.items()))
    try:
        known = key in _SHARED
    except TypeError:  # an option that cannot be hashed, such as a dict of reductions
        return _train_on_one_device(make_model, loss_fn, batch, **options)
    if not known:
        _SHARED[key] = _train_on_one_device(make_model, loss_fn, batch, **options)
    return _SHARED[key]


def _train_on_one_device(
    make_model: Callable[[], nnx.Module],
    loss_fn: Callable,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 3,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    whole_batch: bool = True,
    **options: Any,
) -> OneDevice:
    """Trains with `nnx.jit`; `options` are more of `train_step`. No schedule makes a difference to it."""
    model = _placed(make_model, None)
    state = nnx.Optimizer(model, optimizer or ADAMW, wrt=wrt)
    step_fn = train_step(nnx.jit, loss_fn, has_aux=has_aux, wrt=wrt, **options)
    birth, taken, whole = snapshot(model), [], None
    for step in range(steps):
        loss, grads = step_fn(model, state, rolled(batch, step))
        taken.append(
            {
                "losses": loss,
                "gradients": grads,
                "model states": snapshot(model),
                "optimizer states": snapshot(state),
            }
        )
    if whole_batch:
        grad_fn = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)
        whole = nnx.jit(grad_fn)(_placed(make_model, None), batch)
    return OneDevice(birth, taken, whole)


def snapshot(node: Any) -> nnx.State:
    """The state of a graph node as it is now: what happens to the node does not change it."""
    return jax.tree.map(lambda leaf: leaf, nnx.state(node))


def rolled(batch: Any, step: int) -> Any:
    """The batch of a step: the same rows, each `step` further down."""
    return jax.tree.map(lambda leaf: np.roll(leaf, step, axis=0), batch)


def assert_parity(
    make_model: Callable[[], nnx.Module],
    loss_fn: Callable,
    batch: Any,
    placement: mm.TaskSharding | None = None,
    *,
    mesh: mm.MultiMesh | None = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 3,
    microbatch: int | None = None,
    schedule: str | None = "1f1b",
    reduce: Any = "mean",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    whole_batch: bool = True,
    rtol: float = 1e-5,
    **loop: Any,
) -> mm.Program:
    """Train for `steps` steps with `nnx.jit` on one device and with `mm.jit` as placed, and compare
    everything.

    `mesh` is made current around the split run. `placement` says where the model's state is born; without one
    the tasks are named inside the model. `whole_batch` says that the mean over microbatches of the loss and
    of its gradients are those of the whole batch, and has that compared too. `loop` are more keywords
    of `mm.microbatch`. State must keep its home from step to step.

    Returns the program that was run.
    """
    options = dict(microbatch=microbatch, reduce=reduce, has_aux=has_aux, wrt=wrt)
    # Those who take fewer steps share what is compiled for three.
    expected = on_one_device(
        make_model,
        loss_fn,
        batch,
        optimizer=optimizer,
        steps=max(steps, 3),
        whole_batch=whole_batch and microbatch is not None,
        **options,
    )
    with mesh or contextlib.nullcontext():
        model, state = born_with_optimizer(make_model, placement, optimizer or ADAMW, wrt)
        assert_same(model, expected.birth, rtol, "states at birth")
        step_fn = train_step(mm.jit, loss_fn, schedule=schedule, loop=loop, **options)
        at_birth = homes(model)

        for step, want in enumerate(expected.steps[:steps]):
            loss, grads = step_fn(model, state, rolled(batch, step))
            assert_same(loss, want["losses"], rtol, f"step {step}: losses")
            assert_same(grads, want["gradients"], rtol, f"step {step}: gradients")
            assert_same(model, want["model states"], rtol, f"step {step}: model states")
            assert_same(state, want["optimizer states"], rtol, f"step {step}: optimizer states")
            if step == 0 and expected.whole_batch is not None:
                assert_same((loss, grads), expected.whole_batch, rtol, "microbatches and whole batch")
            if placement is not None:
                now = homes(model)
                moved = {path: (at_birth[path], now[path]) for path in now if now[path] != at_birth[path]}
                assert not moved, f"step {step}: state moved from its home: {moved}"
        program = step_fn.program(model, state, batch)
        rewrite(program).program.verify()
        return program
