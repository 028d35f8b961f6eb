"""Where the slots of an optimizer live: with their parameters, unless a rule is their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.inspect.locations import Homes, spec_text
from tests.mpmd.parity import assert_same, born, pipeline, values
from tests.slow import few

WIDTH = 8


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


MESH, TASKS = pipeline(3, 2, axes=("data",))
RULES = {mm.path("layers", n): (TASKS[n], P()) for n in range(3)}
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "sm3": lambda: optax.sm3(1e-2),
    "history": lambda: optax.chain(optax.scale_by_lbfgs(3), optax.scale(-1e-2)),
}
ROWS = mm.path("opt_state", ..., "v_row", "layers", ..., "kernel")
ROWS = mm.path("opt_state", ..., "v_row", "layers", ..., "kernel")

# The same said in three ways: from the start of a slot's path, from its middle, and by a function.
ZERO = {
    "whole": [mm.path("opt_state", ..., {"mu", "nu"}, "layers", n) for n in range(3)],
    "middle": [mm.path(..., {"mu", "nu"}, "layers", n) for n in range(3)],
    "function": [lambda path, v, n=n: {"mu", "nu"} & set(path) and n == path[-2] for n in range(3)],
}
ZERO = {kind: {f: (TASKS[n], P("data")) for n, f in enumerate(filters)} for kind, filters in ZERO.items()}


def placed(kind, **out_shardings):
    """The model on three meshes, and its optimizer made with `out_shardings`, for a fresh one of each."""
    with MESH:
        model = born(Model, mm.TaskSharding(RULES))
        make = mm.jit(lambda m: nnx.Optimizer(m, OPTIMIZERS[kind](), wrt=nnx.Param), **out_shardings)
        return model, make(model)


def slots(optimizer):
    """The arrays of slots, by path."""
    found: dict = {}
    for path, v in nnx.to_flat_state(nnx.state(optimizer, nnx.optimizer.OptState)):
        for x in jax.tree.leaves(v.get_raw_value()):  # a list for each parameter, in SM3
            found |= {(*path, len(found)): x} if x.shape else {}
    return found


def stage(path):
    return MESH.mesh.devices[next(n for name, n in zip(path, path[1:]) if name == "layers")]


@few(4)
@pytest.mark.parametrize(
    "sharding", [None, mm.TaskSharding(RULES), mm.TaskSharding({**RULES, ...: TASKS[2]})]
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slots_are_with_their_parameters(kind, sharding):
    """Also those of another shape: the rows and columns of Adafactor, the history of L-BFGS."""
    _, optimizer = placed(kind, out_shardings=sharding)
    found = slots(optimizer)
    assert len(found) >= 6
    for path, x in found.items():
        if "layers" in path:
            assert x.sharding.device_set == set(stage(path)), path
            assert x.sharding.is_fully_replicated


def test_a_rule_for_all_that_is_left_is_not_for_slots():
    """`...` says where what has no parameter goes; slots that have one go with it."""
    _, optimizer = placed("adam", out_shardings=mm.TaskSharding({...: TASKS[2]}))
    assert all(x.sharding.device_set == set(stage(path)) for path, x in slots(optimizer).items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps(kind):
    """What a step computes is that of one device, and nothing but activations and scalars is sent."""

    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean")(model, x)
        optimizer.update(model, grads)
        return loss

    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    whole = Model()
    optimizer = nnx.Optimizer(whole, OPTIMIZERS[kind](), wrt=nnx.Param)
    run = nnx.jit(step)
    expected = [values((run(whole, optimizer, x), nnx.state(whole), nnx.state(optimizer))) for _ in range(2)]
    split = placed(kind)
    with MESH:
        run = mm.jit(step)
        for each in expected:
            assert_same(values((run(*split, x), *map(nnx.state, split))), each, 1e-3)
        large = [t.shape for t in run.program(*split, x).transfers if t.shape and t.microbatch is None]
    assert kind == "history" or not large
    assert all(x.sharding.device_set == set(stage(p)) for p, x in slots(split[1]).items() if "layers" in p)


@pytest.mark.parametrize("kind", ZERO)
def test_a_rule_of_their_own(kind):
    """ZeRO-1 (Rajbhandari et al. 2020): replicated parameters, divided slots; and it stays so."""
    model, optimizer = placed("adam", out_shardings=mm.TaskSharding(ZERO[kind]))

    def specs():
        return {p: x.sharding.spec for p, x in slots(optimizer).items()}, model.layers[1].kernel.sharding.spec

    found = specs()
    assert set(found[0].values()) == {P("data")} and found[1] == P()

    @mm.jit(mesh=MESH)
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    step(model, optimizer, jnp.ones((4, WIDTH)))
    assert specs() == found


def test_a_rule_of_their_own_on_another_mesh():
    rule = mm.TaskSharding({mm.path("opt_state", 0, "mu", "layers", 0, "kernel"): (TASKS[1], P("data"))})
    _, optimizer = placed("adam", out_shardings=rule)
    for path, x in slots(optimizer).items():
        own = path[-6:-1] == (0, "mu", "layers", 0, "kernel")
        assert x.sharding.device_set == set(MESH.mesh.devices[1] if own else stage(path))


def test_made_with_the_model():
    def make():
        model = Model()
        return model, nnx.Optimizer(model, OPTIMIZERS["adafactor"](), wrt=nnx.Param)

    with MESH:
        _, optimizer = mm.jit(make, out_shardings=mm.TaskSharding({ROWS: (TASKS[0], P("data")), **RULES}))()
    for path, x in slots(optimizer).items():
        own = "v_row" in path and "kernel" in path
        assert x.sharding.device_set == set(MESH.mesh.devices[0] if own else stage(path))
        assert x.sharding.spec == (P("data") if own else P())


@pytest.mark.parametrize(
    "rules", [{mm.path("missing"): TASKS[0]}, {**RULES, mm.path("opt_state", ..., "mv"): (TASKS[0], P())}]
)
def test_rules_that_match_nothing(rules):
    with pytest.raises(mm.PlacementError, match=r"no state is placed by path\(.*(missing|mv)"):
        placed("adam", out_shardings=mm.TaskSharding(rules))


def test_a_rule_of_their_own_that_does_not_fit():
    rules = {mm.path("opt_state", ..., "mu", "layers", 0, "bias"): (TASKS[0], P(None, "data"))}
    with pytest.raises(mm.PlacementError, match=r"mu.layers.0.bias .*2 entries"):
        placed("adam", out_shardings=mm.TaskSharding(rules))


@few(4)
@pytest.mark.parametrize(
    "rules", [RULES, *({**zero, **RULES} for zero in ZERO.values())], ids=["none", *ZERO]
)
@pytest.mark.parametrize("kind", ["adam", "adafactor"])
def test_tables_say_the_same(kind, rules):
    if kind == "adafactor" and rules is not RULES:
        rules = {ROWS: (TASKS[0], P("data")), **RULES}
    sharding = mm.TaskSharding(rules)

    def make():
        model = Model()
        return {"model": model, "optimizer": nnx.Optimizer(model, OPTIMIZERS[kind](), wrt=nnx.Param)}

    with MESH:
        made = mm.jit(make, out_shardings=sharding)()
        homes = Homes(sharding)
        for name in ("model", "optimizer"):
            for path, v in nnx.to_flat_state(nnx.state(made[name])):
                x = v.get_raw_value()
                if x.shape:
                    (said,) = homes.find([path], v, [x])
                    assert said.spec == spec_text(x.sharding.spec), path
                    assert set(said.home.devices) == {d.id for d in x.sharding.device_set}, path


class Pair(nnx.Module):
    """Two models in one, of which each may have an optimizer of its own."""

    def __init__(self):
        self.first, self.second = Model(), Model()
        self.second.layers = nnx.List([nnx.Linear(WIDTH, 2 * WIDTH, rngs=nnx.Rngs(n)) for n in range(3)])


def test_of_a_part_of_the_model():
    """Its parameters are at longer paths in the argument than in the optimizer."""
    reverse = {mm.path("second", "layers", n): (TASKS[2 - n], P()) for n in range(3)}
    rules = {mm.path("first", "layers", n): (TASKS[n], P()) for n in range(3)} | reverse
    with MESH:
        pair = mm.jit(Pair, out_shardings=mm.TaskSharding(rules))()
        first, second = mm.jit(
            lambda m: tuple(nnx.Optimizer(x, optax.adam(1e-2), wrt=nnx.Param) for x in (m.first, m.second))
        )(pair)
    for n in range(3):
        for optimizer, device in ((first, n), (second, 2 - n)):
            slot = optimizer.opt_state[0].mu["layers"][n]["kernel"][...]
            assert slot.sharding.device_set == set(MESH.mesh.devices[device])


def test_of_two_models_whose_paths_are_alike():
    reverse = mm.TaskSharding({mm.path("layers", n): (TASKS[2 - n], P()) for n in range(3)})
    with MESH:
        one, two = mm.jit(lambda: (Model(), Model()), out_shardings=(mm.TaskSharding(RULES), reverse))()
        optimizers = mm.jit(
            lambda *models: tuple(nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in models)
        )(one, two)
    for model, optimizer in zip((one, two), optimizers):
        for n in range(3):
            weight, slot = model.layers[n].kernel[...], optimizer.opt_state[0].mu["layers"][n]["kernel"][...]
            assert slot.sharding.device_set == weight.sharding.device_set


def linear(size=WIDTH):
    return nnx.Linear(size, WIDTH, rngs=nnx.Rngs(0))


class Agent(nnx.Module):
    """Modules that are alike in paths, two of them in shapes too."""

    def __init__(self):
        self.actor, self.critic, self.twin = linear(), linear(2 * WIDTH), linear(2 * WIDTH)
        self.average = nnx.clone(self.actor)


PARTS = {"actor": 0, "average": 1, "critic": 1, "twin": 2}
AGENT = mm.TaskSharding({mm.path(name): (TASKS[n], P()) for name, n in PARTS.items()})


def adam(module):
    return nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)


def check_parts(agent, optimizers):
    for name, optimizer in optimizers.items():
        for path, x in slots(optimizer).items():
            assert x.sharding.device_set == set(MESH.mesh.devices[PARTS[name]]), (name, path)
            assert not optimizer.opt_state[0].mu["kernel"].has_metadata("mmnnx_origin")
    assert not agent.actor.kernel.has_metadata("mmnnx_origin")


@few(1)
@pytest.mark.parametrize("names", [["actor"], ["twin", "critic", "actor"], ["average", "twin"]])
def test_of_parts_that_are_alike(names):
    """A network and its moving average, two critics, in any order: each by the parameters it was made for."""
    traced = []

    def make(agent):
        traced.append(agent)
        return {name: adam(getattr(agent, name)) for name in names}

    with MESH:
        agent = mm.jit(Agent, out_shardings=AGENT)()
        make_optimizers = mm.jit(make)
        for _ in range(2):
            check_parts(agent, make_optimizers(agent))
    assert len(traced) == 2  # once more, to find out


def test_of_parts_that_are_made_with_them():
    """In the order of those that are alike, for nothing is known but that."""

    class Twins(nnx.Module):
        def __init__(self):
            self.critic, self.twin = linear(), linear()

    def make():
        twins = Twins()
        return twins, adam(twins.critic), adam(twins.twin)

    rules = mm.TaskSharding({mm.path(name): (TASKS[PARTS[name]], P()) for name in ("critic", "twin")})
    with MESH:
        _, critic, twin = mm.jit(make, out_shardings=(rules, None, None))()
    for optimizer, n in ((critic, 1), (twin, 2)):
        for x in slots(optimizer).values():
            assert x.sharding.device_set == set(MESH.mesh.devices[n])


def test_to_ask_may_not_work():
    """A function that compares the state of an argument with that of a new module is traced as it is."""

    def make(agent):
        both = jax.tree.map(lambda a, b: a + b, nnx.state(linear()), nnx.state(agent.actor))
        return both, adam(agent.actor)

    with MESH:
        agent = mm.jit(Agent, out_shardings=AGENT)()
        both, optimizer = mm.jit(make)(agent)
        assert_same(both["kernel"].get_value(), 2 * agent.actor.kernel[...])
        assert not optimizer.opt_state[0].mu["kernel"].has_metadata("mmnnx_origin")


def test_a_model_by_itself_is_traced_once():
    traced = []
    with MESH:
        model = born(Model, mm.TaskSharding(RULES))
        mm.jit(lambda m: traced.append(m) or adam(m))(model)
    assert len(traced) == 1
