"""Optimizer state is sharded like its parameters, whichever way it comes to be placed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.inspect.locations import Homes
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.state_shardings import shardings_of
from tests.mpmd.parity import assert_same, pipeline, values
from tests.slow import all_but, grid

MESH, _ = pipeline(2, 2)
TASKS = [
    mm.Task(f"stage{n}", mesh_slice={"stage": n}, logical_axes=mm.logical_rules("tensor")) for n in range(2)
]


class Layer(nnx.Module):
    """The kernels have logical axes, the bias has none."""

    def __init__(self, rngs):
        named = lambda *names: nnx.with_partitioning(
            nnx.initializers.lecun_normal(), names, eager_sharding=False
        )
        self.up = nnx.Linear(8, 16, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(Layer(rngs) for _ in range(2))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def labels(params):
    return jax.tree.map_with_path(lambda path, _: "a" if "up" in str(path) else "b", params)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, 0.9)}, labels
    ),
    "ema": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "history": lambda: optax.chain(optax.scale_by_lbfgs(3), optax.scale(-1e-2)),
    "novograd": lambda: optax.novograd(1e-2),  # a scalar for each parameter
}


def placement():
    return mm.pipeline_sharding(nnx.eval_shape(Model), TASKS)


def optimizer_of(model, kind):
    return nnx.Optimizer(model, OPTIMIZERS[kind](), wrt=nnx.Param)


def on_the_host(kind):
    model = Model()
    return model, optimizer_of(model, kind)


def both_by_out_shardings(kind):
    return mm.jit(lambda m, o: (m, o), out_shardings=placement())(*on_the_host(kind))


def both_by_a_prefix(kind):
    rules = placement()
    return mm.jit(lambda m, o: (m, o), out_shardings=(rules, rules))(*on_the_host(kind))


def both_by_in_shardings(kind):
    rules = placement()
    return mm.jit(lambda m, o: (m, o), in_shardings=(rules, rules))(*on_the_host(kind))


def in_a_dict(kind):
    model, optimizer = on_the_host(kind)
    state = mm.jit(lambda state: state, out_shardings=placement())({"model": model, "optimizer": optimizer})
    return state["model"], state["optimizer"]


def made_with_the_model(kind):
    return mm.jit(lambda: on_the_host(kind), out_shardings=placement())()


def made_of_a_placed_model(kind):
    model = mm.jit(Model, out_shardings=placement())()
    return model, mm.jit(lambda m: optimizer_of(m, kind))(model)


def made_of_a_placed_model_with_rules(kind):
    model = mm.jit(Model, out_shardings=placement())()
    return model, mm.jit(lambda m: optimizer_of(m, kind), out_shardings=placement())(model)


ROUTES = [
    both_by_out_shardings,
    both_by_a_prefix,
    both_by_in_shardings,
    in_a_dict,
    made_with_the_model,
    made_of_a_placed_model,
    made_of_a_placed_model_with_rules,
]
SPECS = {  # by the parameter's name and the shape of its state; None: in a dimension that the state alone has
    ("up.kernel", (8, 16)): P(None, "model"),
    ("up.kernel", (8,)): P(),
    ("up.kernel", (16,)): P("model"),
    ("up.kernel", (3, 8, 16)): P(None, None, "model"),
    ("down.kernel", (16, 8)): P("model", None),
    ("down.kernel", (8,)): P(),
    ("down.kernel", (16,)): P("model"),
    ("down.kernel", (3, 16, 8)): P(None, "model", None),
}


@pytest.fixture(autouse=True)
def on_the_mesh():
    with MESH:
        yield


def state_of(optimizer):
    """(path of the parameter, its block, its name, the array), for all optimizer state of a parameter."""
    for path, variable in nnx.to_flat_state(nnx.state(optimizer, nnx.optimizer.OptState)):
        text = ".".join(map(str, path))
        found = re.search(r"blocks\.(\d)\.((?:up|down)\.(?:kernel|bias))", text)
        for x in jax.tree.leaves(variable.get_raw_value()):
            if found:
                yield text, int(found[1]), found[2], x


def expected(block, name, shape):
    mesh = TASKS[block].to_mesh()
    return NamedSharding(mesh, SPECS.get((name, tuple(shape)), P()))


@pytest.mark.parametrize(("kind", "route"), grid(list(OPTIMIZERS), ROUTES, step=3))
def test_like_the_parameter(kind, route):
    model, optimizer = route(kind)
    assert model.blocks[1].up.kernel.sharding.spec == P(None, "model")
    found = list(state_of(optimizer))
    assert len(found) >= 6
    for path, block, name, x in found:
        assert x.sharding.is_equivalent_to(expected(block, name, x.shape), x.ndim), (
            path,
            x.shape,
            x.sharding,
        )


@pytest.mark.parametrize("kind", all_but(["adam"], OPTIMIZERS))
def test_what_is_unplaced_from_the_first_call_on(kind):
    """No device ever holds all of it, and the second call is given what the first was compiled for."""

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    (model, optimizer), x = on_the_host(kind), jnp.ones((4, 8))
    train_step = mm.jit(step, in_shardings=(placement(), None, None))
    first = train_step.lower(model, optimizer, x).compile().input_shardings
    train_step(model, optimizer, x)
    later = train_step.lower(model, optimizer, x).compile().input_shardings
    assert first[0][1] == later[0][1]
    assert [s.spec for s in jax.tree.leaves(first[0][1])].count(P(None, "model")) >= 2
    for path, block, name, x in state_of(optimizer):
        assert not x.ndim or x.sharding.is_equivalent_to(expected(block, name, x.shape), x.ndim), path


def as_state(model):
    return nnx.state(model, nnx.Param)


def as_dict(model):
    return nnx.to_pure_dict(as_state(model))


def optax_of_a_placed_model(make, **shardings):
    model = mm.jit(Model, out_shardings=placement())()
    return model, mm.jit(make, **shardings)(model)


def optax_of_a_placed_model_with_rules(make):
    return optax_of_a_placed_model(make, out_shardings=placement())


def optax_with_the_model(make):
    def both():
        model = Model()
        return model, make(model)

    return mm.jit(both, out_shardings=placement())()


def optax_by_in_shardings(make):
    model = Model()
    rules = placement()
    return mm.jit(lambda m, s: (m, s), in_shardings=(rules, rules))(model, make(model))


OPTAX_ROUTES = [
    optax_of_a_placed_model,
    optax_of_a_placed_model_with_rules,
    optax_with_the_model,
    optax_by_in_shardings,
]


@pytest.mark.parametrize(
    ("kind", "route", "parameters"), grid(list(OPTIMIZERS), OPTAX_ROUTES, [as_state, as_dict])
)
def test_state_of_optax_itself(kind, route, parameters):
    """No `nnx.Optimizer` holds it: `tx.init` of a State, or of a dict of arrays."""
    _, state = route(lambda model: OPTIMIZERS[kind]().init(parameters(model)))
    found = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        text = jax.tree_util.keystr(path, simple=True, separator=".")
        if of := re.search(r"blocks\.(\d)\.((?:up|down)\.(?:kernel|bias))", text):
            found += 1
            like = expected(int(of[1]), of[2], x.shape)
            assert x.sharding.is_equivalent_to(like, x.ndim), (text, x.shape, x.sharding)
    assert found >= 6


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_alone(kind):
    """What the parameter's shape would say is not known; moments are sharded all the same."""
    _, optimizer = on_the_host(kind)
    optimizer = mm.jit(lambda o: o, out_shardings=placement())(optimizer)
    for path, block, name, x in state_of(optimizer):
        like = expected(block, name, x.shape)
        if x.ndim != 2:
            like = NamedSharding(like.mesh, P())
        assert x.sharding.is_equivalent_to(like, x.ndim), (path, x.shape, x.sharding)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tables_and_checkpoints_say_the_same(kind):
    model, optimizer = nnx.eval_shape(lambda: on_the_host(kind))
    nodes = {"model": model, "optimizer": optimizer}
    restored = shardings_of(nodes, placement())
    homes = Homes(placement())
    for name, node in nodes.items():
        for path, variable in nnx.to_flat_state(nnx.state(node)):
            arrays = jax.tree.leaves(variable.get_raw_value())
            for x, said in zip(arrays, homes.find([path], variable, arrays)):
                found = re.search(r"blocks\.(\d)\.(.+?\.(?:kernel|bias))", ".".join(map(str, path)))
                if found:
                    like = expected(int(found[1]), found[2], x.shape)
                    told = restored[(name, *map(str, path))]
                    assert told.is_equivalent_to(like, len(x.shape)), path
                    assert said.shard_bytes == 4 * np.prod(like.shard_shape(x.shape)), path


def test_state_of_a_scalar_parameter():
    """As the gate of a layer, which has a rule: nothing of its moments is sent to other stages."""

    class Gated(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List(nnx.Dict(gate=nnx.Param(jnp.ones(()))) for _ in range(2))

    rules = mm.TaskSharding({mm.path("blocks", n): task for n, task in enumerate(TASKS)})
    make = lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model = mm.jit(Gated, out_shardings=rules)()
    for optimizer in mm.jit(make)(model), mm.jit(make, out_shardings=rules)(model):
        for n, task in enumerate(TASKS):
            moment = optimizer.opt_state[0].mu["blocks"][n]["gate"]
            assert moment.sharding.device_set == set(task.to_mesh().devices.flat)
        assert len(optimizer.opt_state[0].count.sharding.device_set) == 4


def test_a_rule_for_all_that_is_left():
    """It places counts of an optimizer too: in a call, in tables and in what is restored."""
    rules = mm.TaskSharding({mm.path("blocks", 0): TASKS[0], ...: TASKS[1]})
    last = set(TASKS[1].to_mesh().devices.flat)
    _, made = mm.jit(lambda: on_the_host("adam"), out_shardings=rules)()
    assert made.opt_state[0].count.sharding.device_set == made.step.sharding.device_set == last
    model, optimizer = nnx.eval_shape(lambda: on_the_host("adam"))
    restored = shardings_of({"model": model, "optimizer": optimizer}, rules)
    assert restored["optimizer", "opt_state", "0", "count"].device_set == last
    assert restored["optimizer", "step"].device_set == last
    count = optimizer.opt_state[0].count
    (told,) = Homes(rules).find([("opt_state", 0, "count")], count, [count.get_raw_value()])
    assert told.home.task == "stage1"


def test_names_of_its_own():
    """Flax's `optimizer_sharding` names the axes of optimizer state apart from those of the parameter."""

    def make():
        init = nnx.with_metadata(
            nnx.initializers.lecun_normal(), out_sharding=("mlp", None), optimizer_sharding=(None, "mlp")
        )
        model = nnx.Linear(4, 8, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    rules = mm.TaskSharding({...: TASKS[0]})
    model, optimizer = mm.jit(lambda m, o: (m, o), out_shardings=rules)(*make())
    assert model.kernel.sharding.spec == P("model", None)
    assert optimizer.opt_state[0].mu["kernel"].sharding.spec == P(None, "model")


def test_models_with_one_path():
    """The state of each has the shape that says whose it is."""

    def make(size):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"), eager_sharding=False)
        model = nnx.Linear(4, size, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        return model, optimizer_of(model, "adam")

    rules = mm.TaskSharding({...: TASKS[0]})
    small, large = mm.jit(lambda *x: x, out_shardings=rules)(make(2), make(6))
    for _, optimizer in (small, large):
        assert optimizer.opt_state[0].mu["kernel"].sharding.spec == P(None, "model")


@pytest.mark.parametrize(
    "route", all_but([both_by_in_shardings], [both_by_out_shardings, both_by_in_shardings])
)
def test_a_step_keeps_them(route):
    """The same values as on one device, and no state is gathered or replicated by a step."""

    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean")(model, x)
        optimizer.update(model, grads)
        return loss

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    whole, split = on_the_host("adafactor"), route("adafactor")
    before = [x.sharding for *_, x in state_of(split[1])]
    losses = nnx.jit(step)(*whole, x), mm.jit(step)(*split, x)
    assert_same(
        values((losses[1], *map(nnx.state, split))), values((losses[0], *map(nnx.state, whole))), 1e-4
    )
    assert [x.sharding for *_, x in state_of(split[1])] == before


def test_abstract_state_is_planned_as_it_is_placed():
    """`in_shardings` of a step that is only planned: no optimizer state is whole on every device."""

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    model, optimizer = nnx.eval_shape(lambda: on_the_host("adam"))
    rules = placement()
    planned = mm.jit(step, in_shardings=(rules, rules, None))
    (_, of_optimizer, _), _ = planned.input_shardings(model, optimizer, np.ones((4, 8), np.float32))
    for path, sharding in nnx.to_flat_state(of_optimizer):
        text = ".".join(map(str, path))
        if "mu" in path and "kernel" in path:
            assert "model" in jax.tree.leaves(tuple(jax.tree.leaves(sharding)[0].spec)), text


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 6), P("data", "model")),
        ((2, 3, 4, 6), P(None, None, "data", "model")),
        ((4, 1), P("data")),
        ((6,), P("model")),
        ((), P()),
        ((4, 7), P()),
        ((6, 4), P()),
        ((1,), P()),
    ],
)
def test_aligned(shape, spec):
    assert aligned_spec(P("data", "model"), (4, 6), shape) == spec


def test_aligned_where_sizes_do_not_tell():
    assert aligned_spec(P("data", "model"), (4, 4), (4,)) == P()
    assert aligned_spec(P("data"), (4, 4, 8), (4, 8)) == P()
    assert aligned_spec(P(None, None, "data"), (4, 4, 8), (4, 8)) == P(None, "data")


def test_made_of_a_model_that_is_on_one_mesh():
    """Nothing is to be divided there, and XLA alone would replicate what starts as zeros."""
    model = mm.jit(Layer, out_shardings=mm.TaskSharding({...: TASKS[0]}))(nnx.Rngs(0))
    optimizer = mm.jit(lambda m: optimizer_of(m, "adam"))(model)
    moments = optimizer.opt_state[0].mu
    assert moments["up"]["kernel"].sharding.spec == P(None, "model")
    assert moments["down"]["kernel"].sharding.spec == P("model", None)
