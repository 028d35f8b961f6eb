"""A train step of a linen model, made parallel together with its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mmnnx as mm
from multimesh_compat.jax.constraints import logical_names
from multimesh_compat.jax.flax.axes import ShardedAxes
from multimesh_compat.jax.jitted import mjit
from multimesh_compat.jax.parallel import parallelized
from multimesh_compat.jax.unsplit import tracing_shapes


class State(TrainState):
    """A `flax.training.train_state.TrainState` with the variables of a model that are not parameters.

    Attributes:
      collections: the other collections of variables, such as "batch_stats"; empty for most models.
    """

    collections: Any = struct.field(default_factory=dict)


def parallelize_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | mm.MultiMesh,
    global_batch: Any = None,
    local_batch: Any = None,
    replicate_inputs: bool = True,
    *,
    rng: jax.Array | Mapping[str, jax.Array] | None = None,
) -> tuple[Any, ...]:
    """The train step of a linen model and its first state, sharded (`multimesh.jax.flax.parallelize_step`).

    Each parameter is on the submesh of the task that reads it first (one made by `task`, or registered for
    the name of a module), sharded there as its axis names say: those of `shard_axes` or
    `nn.with_partitioning`, translated by that task; without names it is replicated. Optimizer state lives
    where its parameter does, and is sharded like it. Scalars are replicated on all devices. The state is
    initialised on its devices, never whole on one device.

    Args:
      model: a linen Module whose `__call__(batch)` returns the loss, a scalar of a floating type.
      optimizer: an optax transformation.
      mesh: the mesh that tasks slice, and whose devices they number.
      global_batch: a batch, a pytree of arrays, for its shapes and dtypes. Give this or `local_batch`.
      local_batch: the share that this process has of a batch; in one process that is all of it.
      replicate_inputs: whether all devices have the whole batch. Otherwise each array is where it is read
        first, sharded as the constraints inside the model imply.
      rng: the key, or keys by name, for `model.init`. Of those named otherwise than "params", such as
        "dropout", each step has another, made with `jax.random.fold_in(key, state.step)`. Default:
        `jax.random.key(42)`.

    Returns:
      (step, state, mesh), and with `local_batch` (step, state, mesh, prepare_batch).
      `step(state, batch) -> (loss, state)` is made by `mjit`; it takes batches of any sharding, and moves
      those that are elsewhere. The state is a `TrainState` of plain arrays. `mesh` is as given.
      `prepare_batch(local_batch)` makes the batch where `step` wants it.

    Raises:
      ValueError: both or neither of `global_batch` and `local_batch`, a loss that is no scalar, or a model
        without parameters; and as `mmnnx.jit` does.
      TypeError: a model, an optimizer or a mesh that is something else.

    Example:
      >>> from flax import linen as nn
      >>> class Network(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):  # the loss
      ...         return (task(nn.Dense, mesh_slice={"stage": 1})(4)(x) ** 2).mean()
      >>> x = jnp.ones((8, 4))
      >>> step, state, mesh = parallelize_step(Network(), optax.sgd(0.1), mesh, global_batch=x)
      >>> loss, state = step(state, x)
    """
    _check(model, optimizer, mesh, global_batch, local_batch)
    multimesh = mesh if isinstance(mesh, mm.MultiMesh) else mm.MultiMesh(global_mesh=mesh)
    batch = global_batch if local_batch is None else local_batch
    keys = dict(rng) if isinstance(rng, Mapping) else {"params": jax.random.key(42) if rng is None else rng}

    def init() -> Any:
        with logical_names():
            return _unboxed(model.init(keys, batch))

    def loss(variables: Any, batch: Any, step: Any = 0) -> tuple[jax.Array, Any]:
        rngs = {name: jax.random.fold_in(key, step) for name, key in keys.items() if name != "params"}
        mutable = [name for name in boxes if name != "params"]
        boxed = jax.tree.map(
            lambda box, x: box.replace_boxed(x) if _is_box(box) else x, boxes, variables, is_leaf=_is_box
        )
        with logical_names():
            value, updates = model.apply(boxed, batch, rngs=rngs, mutable=mutable)
        return value, _unboxed(updates)

    def named(shardings: Any) -> Any:
        """Without axis names a parameter is replicated on its submesh, whatever XLA would derive."""
        return jax.tree.map(
            lambda box, s: s if _is_box(box) else NamedSharding(s.mesh, PartitionSpec()),
            boxes,
            shardings,
            is_leaf=_is_box,
        )

    def step(state: State, batch: Any) -> tuple[jax.Array, State]:
        def of_params(params: Any) -> Any:
            return loss({**state.collections, "params": params}, batch, state.step)

        (value, updates), grads = jax.value_and_grad(of_params, has_aux=True)(state.params)
        return value, state.apply_gradients(grads=grads, collections=updates)

    with multimesh:
        with logical_names(), tracing_shapes():
            value, variables = jax.eval_shape(model.init_with_output, keys, batch)
        _check_results(model, value, variables)
        boxes = jax.tree.map(_logical, variables, is_leaf=_is_box)
        _, init, get_batch = parallelized(loss, init, lambda: batch, adjusted=named)
        everywhere = NamedSharding(multimesh.mesh, PartitionSpec())
        inputs = jax.tree.map(lambda x: everywhere if replicate_inputs else x.sharding, get_batch())
        collections = init()
        params = collections.pop("params")
        opt_state = mm.jit(optimizer.init)(params)
    count = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
    state = State(count, model.apply, params, optimizer, opt_state, collections)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = mjit(step, mesh=multimesh, in_shardings=(shardings, inputs), out_shardings=(None, shardings))
    if local_batch is None:
        return jitted, state, mesh
    return jitted, state, mesh, lambda b: jax.tree.map(jax.make_array_from_process_local_data, inputs, b)


def _logical(x: Any) -> Any:
    return ShardedAxes(x.value, names=x.names) if _is_box(x) else x


def _unboxed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.value if _is_box(x) else x, tree, is_leaf=_is_box)


def _is_box(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)


def _check(model: Any, optimizer: Any, mesh: Any, global_batch: Any, local_batch: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize_step: model is a linen Module, such as Network(), not {model!r}")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"parallelize_step: optimizer is an optax transformation, not {optimizer!r}")
    if not isinstance(mesh, Mesh | mm.MultiMesh):
        raise TypeError(f"parallelize_step: mesh is a jax.sharding.Mesh or a MultiMesh, not {mesh!r}")
    if (global_batch is None) == (local_batch is None):
        which = "neither" if global_batch is None else "both"
        raise ValueError(f"parallelize_step: give one of global_batch= and local_batch=, not {which}")


def _check_results(model: nn.Module, loss: Any, variables: Any) -> None:
    name = type(model).__name__
    single = isinstance(loss, jax.ShapeDtypeStruct) and loss.shape == ()
    if not single or not jnp.issubdtype(loss.dtype, jnp.floating):
        found = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", loss)
        raise ValueError(
            f"parallelize_step: {name}.__call__(batch) returns the loss, a scalar of a floating type, not "
            f"{found}"
        )
    if not jax.tree.leaves(variables.get("params")):
        raise ValueError(f"parallelize_step: {name} has no parameters, so there is nothing to train")
