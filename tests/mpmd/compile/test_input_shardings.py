"""Where arguments would best live (`mm.jit(f).input_shardings`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, pipeline


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def stages():
    """Two stages of 2x2 devices: the first row-parallel with a cast, the second column-parallel."""
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))

    def first(w, x):
        w = mm.with_sharding_constraint(w.astype(jnp.bfloat16), P("model"))
        return mm.with_sharding_constraint(x, P("data")) @ w.astype(jnp.float32)

    def second(w, x):
        return x @ mm.with_sharding_constraint(w, P(None, "model"))

    first, second = mm.task(first, task=tasks[0]), mm.task(second, task=tasks[1])
    return mesh, lambda params, x: (second(params["b"], first(params["a"], x)) ** 2).mean()


PARAMS = {"a": shape(8, 8), "b": shape(8, 8)}


def where(sharding):
    return sorted(d.id for d in sharding.device_set), sharding.spec


def test_each_argument_goes_to_its_first_reader_sharded_as_constraints_imply():
    mesh, loss = stages()
    for f in (loss, jax.grad(loss)):
        (params, x), kwargs = mm.jit(f, mesh=mesh).input_shardings(PARAMS, shape(16, 8))
        assert where(params["a"]) == ([0, 1, 2, 3], P("model"))
        assert where(params["b"]) == ([4, 5, 6, 7], P(None, "model"))
        assert where(x) == ([0, 1, 2, 3], P("data"))
        assert kwargs == {}


def test_a_batch_that_a_loop_slices_is_sharded_as_its_slices_are():
    mesh, loss = stages()

    def step(params, x):
        _, grads = mm.microbatch(jax.value_and_grad(loss), 0, 4, argnum=1)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    (params, x), _ = mm.jit(step, mesh=mesh).input_shardings(PARAMS, shape(16, 8))
    assert [where(params[k])[1] for k in "ab"] == [P("model"), P(None, "model")]
    assert where(x) == ([0, 1, 2, 3], P("data"))


def test_derived_shardings_are_what_a_call_can_be_given():
    mesh, loss = stages()
    params = {k: jnp.linspace(0, 1, 64).reshape(8, 8) + n for n, k in enumerate("ab")}
    x = jnp.linspace(-1, 1, 128).reshape(16, 8)
    shardings, _ = mm.jit(loss, mesh=mesh).input_shardings(params, x)
    f = mm.jit(loss, mesh=mesh, in_shardings=shardings)
    assert_same(f(params, x), loss(params, x), rtol=1e-5)
    assert_same(f(*jax.device_put((params, x), shardings)), loss(params, x), rtol=1e-5)


def test_what_is_placed_stays_and_helps_to_place_the_rest():
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))
    here = NamedSharding(mesh.slice(stage=1), P(None, "model"))
    w = jax.device_put(jnp.ones((8, 8)), here)
    f = mm.task(lambda w, b: mm.with_sharding_constraint(w + b, P("data")), task=tasks[1])
    (first, second), _ = mm.jit(f, mesh=mesh).input_shardings(w, shape(8, 8))
    assert first == here
    assert where(second) == ([4, 5, 6, 7], P("data"))


def test_scalars_live_everywhere_and_unconstrained_arrays_are_replicated():
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))
    scale = mm.task(lambda x, k: x * k, task=tasks[1])
    (x, k, unused), _ = mm.jit(lambda x, k, unused: scale(x, k), mesh=mesh).input_shardings(
        shape(4), shape(), shape(3)
    )
    assert where(x) == ([4, 5, 6, 7], P())
    assert where(k) == (list(range(8)), P())
    assert unused.is_fully_replicated


def test_shared_state_has_its_home_where_the_flow_meets_it_first():
    mesh, tasks = pipeline(2, 2)
    embed = mm.task(lambda table, ids: table[ids], task=tasks[0])
    attend = mm.task(lambda table, x: x @ table.T, task=tasks[1])
    f = mm.jit(jax.grad(lambda table, ids: attend(table, embed(table, ids)).sum()), mesh=mesh)
    (table, ids), _ = f.input_shardings(shape(6, 4), shape(3, dtype=jnp.int32))
    assert where(table)[0] == where(ids)[0] == [0, 1]


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(mm.with_sharding_constraint(self.up(x), P(None, "model")))


def test_an_abstract_module_gives_states_that_place_the_real_one():
    mesh, tasks = pipeline(2, 2)
    run = mm.task(lambda model, x: model(x), task=tasks[1])
    abstract = nnx.eval_shape(lambda: MLP(rngs=nnx.Rngs(0)))
    f = mm.jit(lambda models, x: run(models[0], x), mesh=mesh)
    (models, _), _ = f.input_shardings([abstract], shape(2, 4))
    (state,) = models
    assert where(state["up"]["kernel"]) == ([2, 3], P(None, "model"))
    assert where(state["up"]["bias"]) == ([2, 3], P("model"))
    model = mm.jit(lambda: MLP(rngs=nnx.Rngs(0)), out_shardings=nnx.StateSharding(state), mesh=mesh)()
    assert model.up.kernel.get_raw_value().sharding == state["up"]["kernel"]
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    assert_same(mm.jit(run, mesh=mesh)(model, x), run(MLP(rngs=nnx.Rngs(0)), x))


def test_without_tasks_constraints_are_over_the_whole_multimesh():
    mesh, _ = pipeline(2, 4)
    (w,), _ = mm.jit(
        lambda w: jax.lax.with_sharding_constraint(w, P("model")) * 2, mesh=mesh
    ).input_shardings(shape(8))
    assert where(w) == (list(range(8)), P("model"))


def test_a_function_that_does_nothing():
    (x,), _ = mm.jit(lambda x: x).input_shardings(shape(3))
    assert x.is_fully_replicated and len(x.device_set) == 1
