"""Keys that a function makes of literals are made before its program runs, and given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile import outline
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.ir.fragments import Fragment
from tests.mpmd.parity import assert_same, pipeline, values
from tests.slow import all_but

WIDTH = 16


class Drawn(nnx.Module):
    """Layers of one size with an embedding before them; streams are kept for dropout."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 6):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers))
        self.drops = nnx.List(nnx.Dropout(0.5, rngs=rngs) for _ in range(layers))


def from_keys(make_key: Callable[[int], jax.Array]) -> Callable[[], Any]:
    """What draws without NNX, by keys of keys."""

    def make() -> Any:
        embed, *keys = jax.random.split(make_key(7), 7)
        draw = lambda key: nnx.Param(jax.random.normal(key, (WIDTH, WIDTH)))
        return nnx.Dict(
            embed=nnx.Param(jax.random.uniform(jax.random.fold_in(embed, 3), (32, WIDTH))),
            blocks=nnx.List(draw(key) for key in keys),
            drops=nnx.List(nnx.Param(jax.random.normal(key, (2 * WIDTH,))) for key in keys),
        )

    return make


MAKERS = {
    "Rngs": lambda: Drawn(nnx.Rngs(0)),
    "several streams": lambda: Drawn(nnx.Rngs(0, params=1, dropout=2)),
    "keys": from_keys(jax.random.key),
    "another kind of keys": from_keys(lambda seed: jax.random.key(seed, impl="rbg")),
    "raw keys": from_keys(jax.random.PRNGKey),
}


def born(make: Callable[[], Any]) -> tuple[Any, mm.Program]:
    """Made over three stages, and the program that made it."""
    mesh, tasks = pipeline(3)
    rules: dict[Any, Any] = {mm.path("embed"): (tasks[0], P())}
    for n, task in enumerate(tasks):
        rules[mm.path({"blocks", "drops"}, range(2 * n, 2 * n + 2))] = (task, P())
    with mesh:
        made = mm.jit(make, out_shardings=mm.TaskSharding(rules))
        return made(), made.program()


def draws(f: Fragment) -> int:
    return sum(e.primitive.name == "random_bits" for e in f.jaxpr.eqns)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_drawn_is_as_on_one_device(kind):
    make = MAKERS[kind]
    model, program = born(make)
    assert_same(values(model), values(make()), rtol=1e-6)
    rewritten = rewrite(program)
    runs, numbers, keys = rewritten.program, rewritten.numbers, rewritten.keys
    runs.verify()
    assert not program.inputs and len(runs.inputs) == len(keys) >= 7
    assert {*numbers} == {*range(len(program.instructions))}


@pytest.mark.parametrize("name", all_but(["Rngs", "keys"], ["Rngs", "keys", "raw keys"]))
def test_stages_that_draw_alike_are_compiled_once(name, monkeypatch, codes):
    """So is the first, which draws an embedding besides."""
    monkeypatch.setattr(outline, "loads_on_other_meshes", lambda mesh: True)
    monkeypatch.setattr(outline, "_WORTH", 10)
    _, program = born(MAKERS[name])
    runs = rewrite(program).program
    assert {f.name: draws(f) for f in runs.fragments} == {
        "stage0 (1 of 2)": 1,
        "stage0 (2 of 2)": draws(program.fragments[1]),
        "stage1": draws(program.fragments[1]),
        "stage2": draws(program.fragments[2]),
    }
    assert codes["stage0 (2 of 2)"] is codes["stage1"] is codes["stage2"] is not codes["stage0 (1 of 2)"]


def test_nobody_is_said_to_copy_what_was_not_asked_for():
    """`jax.transfer_guard` finds copies to devices that are an oversight: literals are none."""
    with jax.transfer_guard("disallow"):
        born(MAKERS["keys"])


def test_keys_that_are_arguments_stay_so():
    """Who calls it anew with another key gets other weights, by the program that is there."""
    mesh, tasks = pipeline(2)
    rules = {mm.path(n): (task, P()) for n, task in enumerate(tasks)}

    def make(key: jax.Array) -> nnx.List:
        return nnx.List(nnx.Linear(8, 8, rngs=nnx.Rngs(jax.random.fold_in(key, n))) for n in range(2))

    with mesh:
        made = mm.jit(make, out_shardings=mm.TaskSharding(rules))
        for seed in range(2):
            key = jax.random.key(seed)
            assert_same(values(made(key)), values(make(key)), rtol=1e-6)
            assert not rewrite(made.program(key)).keys


def test_a_program_that_runs_again_draws_the_same():
    """What was given the first time is not used up."""
    mesh, tasks = pipeline(2)

    def add_noise(x):
        return x + jax.random.normal(jax.random.key(1), x.shape)

    @mm.jit
    def noisy(x):
        for task in tasks:
            x = mm.task(add_noise, task=task)(x)
        return x

    with mesh:
        x = jnp.ones((4, WIDTH))
        first, again = noisy(x), noisy(x)
        assert len(rewrite(noisy.program(x)).keys) == 2
    noise = jax.random.normal(jax.random.key(1), x.shape)
    assert_same([first, again], [x + 2 * noise] * 2, rtol=1e-6)


def test_a_seed_that_the_host_is_asked_for_is_asked_for_in_every_call():
    """Though a callback without inputs is of literals alone."""
    mesh, tasks = pipeline(2)
    seeds = iter(range(2))

    def make() -> nnx.List:
        seed = jax.pure_callback(lambda: np.int32(next(seeds)), jax.ShapeDtypeStruct((), jnp.int32))
        return nnx.List([nnx.Param(jax.random.normal(jax.random.key(seed), (WIDTH,)))])

    with mesh:
        made = mm.jit(make, out_shardings=mm.TaskSharding({mm.path(): (tasks[1], P())}))
        drawn = [made()[0][...] for _ in range(2)]
    assert_same(drawn, [jax.random.normal(jax.random.key(n), (WIDTH,)) for n in range(2)], rtol=1e-6)


def test_a_loop_makes_its_own():
    """What runs once for each microbatch is as it was: to give it keys costs more than to make them."""
    mesh, tasks = pipeline(2)
    model = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(2))

    def loss(model, x):
        for layer in model:
            x = layer(x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape))
        return (x**2).mean()

    with mesh:
        placement = mm.TaskSharding({mm.path(n): (task, P()) for n, task in enumerate(tasks)})
        placed = mm.jit(lambda: nnx.clone(model), out_shardings=placement)()
        grad = nnx.value_and_grad(loss)
        step = mm.jit(mm.microbatch(grad, dim=0, size=2, argnum=1, reduce="mean", per_call=1))
        x = jnp.ones((8, WIDTH))
        got = step(placed, x)
        assert not rewrite(step.program(placed, x)).keys
    mask = lambda x: x * jnp.tile(jax.random.bernoulli(jax.random.key(1), 0.5, (2, WIDTH)), (4, 1))
    whole = lambda model, x: (model[1](mask(model[0](mask(x)))) ** 2).mean()
    assert_same(got, nnx.jit(nnx.value_and_grad(whole))(model, x))
