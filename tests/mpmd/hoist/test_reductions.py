"""Over a data axis gradients are reduced once and sharded weights gathered once, not in every microbatch."""

from __future__ import annotations

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules import LM, LMConfig, MoELM, MoELMConfig
from mmnnx.mpmd.hoist import partial_sums
from mmnnx.mpmd.hoist.sharding_propagation import follow
from mmnnx.mpmd.ir.equations import Equation
from mmnnx.sharding.pipeline import pipeline_sharding
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place, train_step
from tests.slow import all_but, few, grid

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture
def hlo(monkeypatch, compiled_anew):
    """Name and optimized HLO of every fragment that is compiled."""
    texts: list[tuple[str, str]] = []
    compile = jax.stages.Lowered.compile

    def watched(self, *args, **kwargs):
        compiled = compile(self, *args, **kwargs)
        text = compiled.as_text()
        texts.append((re.match(r"HloModule jit_(\w+)", text)[1], text))
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", watched)
    return texts


def collectives(hlo: list[tuple[str, str]], sizes: tuple[int, ...]) -> dict[str, Counter]:
    """(kind, dimension of the mesh, or None for several) of the collectives in the loop and outside it."""
    found = {"loop": Counter(), "outside": Counter()}
    for name, text in hlo:
        where = found["loop" if re.search("forward|backward", name) else "outside"]
        for line in text.splitlines():
            if kind := re.search(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", line):
                where[kind[1], dimension(line, sizes)] += 1
    return found


def dimension(line: str, sizes: tuple[int, ...]) -> int | None:
    """Along which dimension of a mesh of these sizes the devices of each group of a collective lie."""
    if given := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]+)\}\}", line):
        groups = [[int(d) for d in group.split(",")] for group in given[1].split("},{")]
    elif given := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = (tuple(map(int, (g or "").split(","))) if g else None for g in given.groups())
        groups = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    else:
        order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        given = re.search(rf"replica_groups=mesh\[(.*?)\]{order} \{{(.*?)\}}", line)
        names, dims = zip(*re.findall(r"'(\w+)'=(\d+)", given[1]))
        dims = tuple(map(int, dims))
        mine = [names.index(n) for n in re.findall(r"'(\w+)'", given[4])]
        ids = np.arange(np.prod(dims))
        if given[3]:
            ids = ids.reshape(json.loads(f"[{given[2]}]")).transpose(json.loads(f"[{given[3]}]"))
        ids = np.moveaxis(ids.reshape(dims), mine, range(-len(mine), 0))
        groups = ids.reshape(-1, np.prod([dims[n] for n in mine])).tolist()
    grid = np.arange(np.prod(sizes)).reshape(sizes)
    for n in range(len(sizes)):
        if {frozenset(g) for g in groups} == {
            frozenset(r) for r in np.moveaxis(grid, n, -1).reshape(-1, sizes[n]).tolist()
        }:
            return n
    return None


class Net(nnx.Module):
    """Of each kind of weight one: an embedding, biases, a norm's scale, products in several shapes."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
        self.mix = nnx.Einsum("bsd,dhk->bshk", (16, 2, 8), (2, 8), rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        mixed = self.mix(x)
        return self.head(self.norm(x + mixed.reshape(x.shape)))


def net_loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def lm_loss(model, tokens):
    return model.loss(tokens)


TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)


def placed(tasks, spec):
    first, second = tasks
    return mm.TaskSharding(
        {
            mm.path({"embed", "blocks"}): (first, spec),
            mm.path({"mix", "norm", "head"}, {"kernel", "scale"}): (second, spec),
            mm.path({"mix", "norm", "head"}): (second, P()),
        }
    )


@pytest.mark.parametrize("spec, schedule", grid([P(), P("data")], ["1f1b", "zero-bubble-h1"]))
def test_nothing_is_reduced_or_gathered_in_the_loop(hlo, spec, schedule):
    mesh, tasks = pipeline(2, 4, axes=("data",))
    program = assert_parity(
        make(Net),
        net_loss,
        TOKENS,
        placed(tasks, spec),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=2,
        schedule=schedule,
        arg_shardings=P("data"),
    )
    found = collectives(hlo, (4,))
    assert not found["loop"]
    assert found["outside"]["all-reduce", 0] >= 2  # one for each stage
    assert (found["outside"]["all-gather", 0] > 0) == (spec == P("data"))
    assert not program.notes


@pytest.mark.slow
def test_without_it_each_microbatch_reduces(hlo, monkeypatch):
    """What the test above counts is there to be counted."""
    monkeypatch.setattr("mmnnx.mpmd.hoist.hoist.hoist_reductions", lambda placed, given: placed)
    mesh, tasks = pipeline(2, 4, axes=("data",))
    with mesh:
        model = born(make(Net), placed(tasks, P("data")))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        step = train_step(mm.jit, net_loss, microbatch=4, loop={"arg_shardings": P("data")})
        step(model, optimizer, TOKENS)
    found = collectives(hlo, (4,))["loop"]
    assert found["all-reduce", 0] >= 2 and found["all-gather", 0] >= 4


@pytest.mark.slow
def test_a_batch_that_arrives_sharded_needs_no_arg_shardings(hlo):
    mesh, tasks = pipeline(2, 4, axes=("data",))
    batch = jax.device_put(TOKENS, jax.NamedSharding(mesh.slice(stage=0), P("data")))
    with mesh:
        model = born(make(Net), placed(tasks, P()))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        train_step(mm.jit, net_loss, microbatch=4)(model, optimizer, batch)
    assert not collectives(hlo, (4,))["loop"]


@pytest.mark.slow
def test_task_meshes_that_name_their_axes_differently(hlo):
    """What is sent between meshes of one shape stays sharded, axis by axis, whatever these are called."""
    tasks = [
        mm.Task(name, mm.TaskMesh(devices=devices, axis_names=(axis,)))
        for name, devices, axis in (("first", [0, 1, 2, 3], "data"), ("second", [4, 5, 6, 7], "rows"))
    ]
    own = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    batch = jax.device_put(TOKENS, jax.NamedSharding(own, P("data")))
    make_optimizer = lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
    whole, model = make(Net)(), born(make(Net), placed(tasks, P()))
    expected = train_step(nnx.jit, net_loss, microbatch=4)(whole, make_optimizer(whole), TOKENS)
    optimizer = mm.jit(make_optimizer)(model)
    step = train_step(mm.jit, net_loss, microbatch=4)
    assert not step.program(model, optimizer, batch).notes
    assert_same(step(model, optimizer, batch), expected)
    assert_same(model, whole)
    found = collectives(hlo, (4,))
    assert not found["loop"] and found["outside"]["all-reduce", 0] >= 2


LOGICAL = {"batch": "data", "heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, fsdp",
    [
        ({}, True),
        ({"scan": 2}, False),
        ({"scan": 2, "remat": True}, True),
        ({"tied": True}, False),
        ({"loss_chunks": 4}, True),
    ],
    ids=lambda x: ("data", "fsdp")[x] if isinstance(x, bool) else "-".join(x) or "plain",
)
def test_a_language_model_over_data_and_tensor(hlo, options, fsdp):
    """Only what tensor parallelism needs is left in the loop: no array is reduced over the data axis."""
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))
    rules = LOGICAL | ({"embed": "data"} if fsdp else {})
    tasks = [mm.Task(t.name, mesh_slice=t.mesh_slice, logical_axes=rules) for t in tasks]
    config = LMConfig(vocab=32, layers=2, width=16, heads=2, kv_heads=2, mlp=32, **options)
    make_model = make(LM, config)
    program = assert_parity(
        make_model,
        lm_loss,
        TOKENS,
        pipeline_sharding(nnx.eval_shape(make_model), tasks),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
        rtol=5e-5,
        whole_batch=False,
        arg_shardings=P("data"),
    )
    assert not program.notes
    found = collectives(hlo, (2, 2))
    assert {n for _, n in found["loop"]} == {1}  # the axis of tensor parallelism
    assert 0 in {n for _, n in found["outside"]}


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_a_mixture_of_experts_over_data_and_experts(remat):
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "expert"))
    rules = {"batch": "data", "expert": "expert"}
    tasks = [mm.Task(t.name, mesh_slice=t.mesh_slice, logical_axes=rules) for t in tasks]
    sizes = dict(vocab=32, layers=2, width=16, heads=2, kv_heads=2, mlp=32, experts=4, top_k=2)
    config = MoELMConfig(**sizes, remat=remat)
    make_model = make(MoELM, config)
    program = assert_parity(
        make_model,
        lm_loss,
        TOKENS,
        pipeline_sharding(nnx.eval_shape(make_model), tasks),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
        rtol=5e-5,
        whole_batch=False,
        arg_shardings=P("data"),
    )
    assert not program.notes
    assert {(2, 4, 16, 32), (2, 4, 32, 16)} <= {tuple(v.aval.shape) for v, _ in program.values}


@pytest.mark.parametrize(
    ("axis", "remat", "parts"), all_but([("data", True, 2)], [("data", True, 2), ("expert", False, 0)])
)
def test_experts_are_summed_after_the_loop(axis, remat, parts):
    """Those of single devices are no sums: there is nothing to note either."""
    mesh, tasks = pipeline(2, 2, axes=(axis,))
    rules = {"batch": "data"} if axis == "data" else {"expert": "expert"}
    tasks = [mm.Task(t.name, mesh_slice=t.mesh_slice, logical_axes=rules) for t in tasks]
    sizes = dict(vocab=32, layers=2, width=16, heads=2, kv_heads=2, mlp=32, experts=4, top_k=2)
    config = MoELMConfig(**sizes, remat=remat)
    over = P("data") if axis == "data" else None
    grad_fn = nnx.value_and_grad(lm_loss)
    loop = mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean", arg_shardings=over)
    with mesh:
        model = nnx.eval_shape(make(MoELM, config))
        step = mm.jit(
            lambda model, tokens: loop(model, tokens), in_shardings=(pipeline_sharding(model, tasks), None)
        )
        program = step.program(model, TOKENS)
    assert not program.notes
    shapes = {tuple(v.aval.shape) for v, _ in program.values}
    assert {(parts, 4, 16, 32), (parts, 4, 32, 16)} <= shapes or not parts


@pytest.mark.parametrize(
    "of_x, of_w, of_result, sums",
    [
        (P(None, "model"), P("model"), P("model"), False),
        (P("data", "model"), P("model"), P("model"), True),
        (P("data"), P(), P(), True),
        (P("one"), P(), P(), False),  # an axis of one device
    ],
)
def test_a_shard_map_may_sum_up_what_its_result_is_not_divided_over(of_x, of_w, of_result, sums):
    sizes = {"data": 2, "model": 2, "one": 1}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    f = jax.shard_map(lambda x, w: w, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_result)
    jaxpr = jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones(4)).jaxpr
    (eqn,) = jaxpr.eqns
    assert partial_sums._may_sum_up(Equation(eqn, ""), eqn.outvars[0], sizes) == sums


class Counting(nnx.Module):
    """A scan over layers whose carry has a scalar besides the activations."""

    def __init__(self, rngs):
        self.layers = nnx.Param(jax.random.normal(rngs.params(), (3, 8, 8)))

    def __call__(self, x, total):
        step = lambda carry, w: ((jnp.tanh(carry[0] @ w), carry[1] + carry[0].mean()), None)
        return jax.lax.scan(step, (x, total), self.layers[...])[0]


@pytest.mark.slow
def test_gradients_of_a_scan_with_a_scalar_in_its_carry():
    """Which the backward hands on as it is."""
    mesh, tasks = pipeline(2, 2, axes=("data",))

    def loss(model, x):
        total = jnp.zeros(())
        for layer in model:
            x, total = layer(x, total)
        return jnp.mean(x**2) + total

    program = assert_parity(
        lambda: nnx.List([Counting(nnx.Rngs(n)) for n in range(2)]),
        loss,
        np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32),
        mm.TaskSharding({mm.path(n): (task, P()) for n, task in enumerate(tasks)}),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
        arg_shardings=P("data"),
    )
    assert not program.notes
    assert (2, 3, 8, 8) in {tuple(v.aval.shape) for v, _ in program.values}  # parts of the sum


class Experts(nnx.Module):
    """Every example goes to every expert; each device computes with its own experts."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 16)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 16, 8)))

    def __call__(self, x):
        x = self.first(x)
        h = jnp.einsum("bd,edf->ebf", x, self.up[...])
        h = jax.lax.with_sharding_constraint(jnp.tanh(h), P("data"))
        return x + jnp.einsum("ebf,efd->bd", h, self.down[...])


def test_weights_that_are_used_in_parts_stay_in_parts():
    """Experts over the data axis are neither gathered nor are their gradients kept in parts."""
    mesh, tasks = pipeline(2, 2, axes=("data",))
    placement = mm.TaskSharding({mm.path("first"): (tasks[0], P()), mm.path(...): (tasks[1], P("data"))})
    x = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    with mesh:
        model = born(lambda: Experts(nnx.Rngs(0)), placement)
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        loop = mm.microbatch(grad_fn, 0, 4, argnum=1, arg_shardings=P("data"), schedule="1f1b")
        program = mm.jit(loop).program(model, x)
    shapes = {tuple(v.aval.shape) for v, _ in program.values}
    assert {(4, 8, 16), (2, 8, 8)} <= shapes  # the first layer's gradient is kept in two parts
    assert (2, 4, 8, 16) not in shapes and (2, 4, 16, 8) not in shapes
    names = [e.primitive.name for f in program.fragments for e in f.jaxpr.eqns if f.phase == "none"]
    assert "sharding_constraint" not in names


def test_operands_that_are_divided_otherwise_over_one_axis():
    """Sequences are divided, and where heads attend their rows are: a gradient sums over both."""
    mesh, tasks = pipeline(2, 2, axes=("context",))
    tasks = [mm.Task(t.name, mesh_slice=t.mesh_slice, logical_axes={"sequence": "context"}) for t in tasks]
    sizes = dict(vocab=32, layers=2, width=16, heads=2, kv_heads=2, mlp=32)
    make_model = make(LM, LMConfig(attention="flash", **sizes))
    assert_parity(
        make_model,
        lambda model, tokens: model.loss(tokens, labels=tokens),
        TOKENS[:, :8],
        pipeline_sharding(nnx.eval_shape(make_model), tasks),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
        rtol=5e-5,
        whole_batch=False,
        arg_shardings=P(None, "context"),
    )


def parity_of_two(make_model, shape):
    """The program of a model of a "first" and a "second" layer, a stage each, over a data axis."""
    mesh, tasks = pipeline(2, 2, axes=("data",))
    return assert_parity(
        make_model,
        lambda model, x: (model(x) ** 2).mean(),
        np.random.default_rng(0).standard_normal(shape, np.float32),
        mm.TaskSharding({mm.path("first"): (tasks[0], P()), mm.path("second"): (tasks[1], P())}),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        whole_batch=False,
        arg_shardings=P("data"),
    )


class Recurrent(nnx.Module):
    """A weight that a scan uses in each iteration: its gradient is a sum that the scan carries."""

    def __init__(self, *, rngs):
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        step = lambda h, row: (jnp.sin(self.second(h) + row), None)
        return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(self.first(x), 0, 1))[0]


def test_what_a_scan_adds_up_is_reduced_after_the_loop(hlo):
    program = parity_of_two(make(Recurrent), (8, 5, 8))
    found = collectives(hlo, (2,))
    assert not found["loop"] and found["outside"]["all-reduce", 0] >= 2
    assert not program.notes


def test_what_a_scan_does_more_than_add_to_is_told():
    @jax.custom_vjp
    def total_of_halves(w, x):
        return x @ w

    def gradients(saved, ct):
        halve = lambda total, rows: (total / 2 + rows[0].T @ rows[1], None)
        (w, x), zeros = saved, jnp.zeros_like(saved[0])
        return jax.lax.scan(halve, zeros, (x.reshape(2, -1, 8), ct.reshape(2, -1, 8)))[0], ct @ w.T

    total_of_halves.defvjp(lambda w, x: (x @ w, (w, x)), gradients)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return total_of_halves(self.second.kernel[...], jnp.sin(self.first(x)))

    program = parity_of_two(lambda: Model(nnx.Rngs(0)), (8, 8))
    (note,) = program.notes
    assert "second.kernel" in note and "a scan carries it, and does more than to add to it" in note


def test_what_cannot_be_taken_after_the_loop_is_told():
    """A gradient that goes through an operation which is not linear, or not known to be, is reduced there."""

    @jax.custom_vjp
    def clipped(w):
        return w

    clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.first(x)) @ clipped(self.second.kernel[...])

    program = parity_of_two(lambda: Model(nnx.Rngs(0)), (8, 8))
    (note,) = program.notes
    assert "second.kernel" in note and "in every microbatch" in note
    assert note in str(program)


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_state_that_is_only_added_to_starts_where_it_is(start):
    """A running total in a Variable goes on from its value; so does one that starts at nought."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.total = nnx.BatchStat(jnp.full((8,), start))

        def __call__(self, x):
            y = self.second(jnp.tanh(self.first(x)))
            self.total[...] += jax.lax.stop_gradient(y).sum(0)
            return y

    mesh, tasks = pipeline(2, 2, axes=("data",))
    program = assert_parity(
        lambda: Model(nnx.Rngs(0)),
        lambda model, x: (model(x) ** 2).mean(),
        np.random.default_rng(0).standard_normal((8, 8), np.float32),
        mm.TaskSharding({mm.path("first"): (tasks[0], P()), mm.path({"second", "total"}): (tasks[1], P())}),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        whole_batch=False,
        arg_shardings=P("data"),
    )
    assert (2, 8) in {tuple(v.aval.shape) for v, _ in program.values}


@few(1)
@pytest.mark.parametrize(
    "count",
    [
        lambda y: jnp.sum(y > 0, 0, dtype=jnp.uint32) // jnp.uint32(2),
        lambda y: jax.lax.div(jnp.sum((y * 100).astype(jnp.int32), 0), 3),
        lambda y: jnp.sum((y > 0).astype(jnp.int8) * jnp.int8(30), 0, dtype=jnp.int8),  # runs over, and stays
        lambda y: -jnp.sum((y * 100).astype(jnp.int16), 0, dtype=jnp.int16) * jnp.int16(7),
    ],
    ids=["uint32 halved", "int32 divided", "int8", "int16"],
)
def test_integers_are_counted_as_on_one_device(count):
    """A sum that is rounded is rounded once, and one of few bits keeps its type."""

    class Model(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2))
            self.hits = nnx.Variable(count(jnp.zeros((1, 4))))

        def __call__(self, x):
            y = self.second(jnp.tanh(self.first(x)))
            self.hits[...] += count(y)
            return y

    def step(spec):
        def run(model, x):
            loop = mm.microbatch(lambda model, x: count(model(x)), 0, 8, argnum=1, arg_shardings=spec)
            return loop(model, x), model.hits[...]

        return run

    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    mesh, tasks = pipeline(2, 2, axes=("data",))
    with mesh:
        model = born(Model, place(tasks, ["first"], ["second", "hits"]))
        found = mm.jit(step(P("data")))(model, x)
    assert_same((*found, nnx.state(model)), (*nnx.jit(step(None))(whole := Model(), x), nnx.state(whole)))


@pytest.mark.slow
def test_stages_that_are_alike_over_data_and_tensor_axes():
    """Two middle stages are one program; how XLA shards its results JAX does not say in names of axes."""
    mesh, tasks = pipeline(4, 2, 1, axes=("data", "model"))
    tasks = [mm.Task(t.name, mesh_slice=t.mesh_slice, logical_axes=LOGICAL) for t in tasks]
    config = LMConfig(vocab=32, layers=4, width=16, heads=2, kv_heads=2, mlp=32, scan=4)
    make = lambda: LM(config, rngs=nnx.Rngs(0))
    assert_parity(
        make,
        lambda model, tokens: model.loss(tokens),
        TOKENS,
        pipeline_sharding(nnx.eval_shape(make), tasks),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
        rtol=5e-5,
        whole_batch=False,
        arg_shardings=P("data"),
    )


class Table(nnx.Module):
    """A layer, and a table of which every example reads a column."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(2))
        self.table = nnx.Param(jax.random.normal(jax.random.key(1), (4, 10)))

    def __call__(self, x):
        column = (jnp.abs(x[:, :1]) * 3).astype(jnp.int32)
        return self.second(self.first(x) + jnp.take_along_axis(self.table[...], column, axis=1))


@pytest.mark.slow
def test_a_lookup_in_which_rows_are_paired():
    mesh, tasks = pipeline(2, 2, axes=("data",))
    assert_parity(
        Table,
        lambda model, x: (model(x) ** 2).mean(),
        np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32),
        mm.TaskSharding({mm.path("second"): (tasks[1], P()), mm.path(...): (tasks[0], P())}),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        whole_batch=False,
        arg_shardings=P("data"),
    )


@pytest.mark.parametrize("read_twice", [False, True])
def test_notes_name_the_parameter_and_no_activation_is_noted(read_twice):
    """Over a tensor axis alone nothing is a sum over examples; over a data axis one that is read twice is."""
    mesh, tasks = pipeline(2, 2, axes=("data",))

    class Two(nnx.Module):
        def __init__(self):
            self.layers = nnx.List(nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(4))

        def __call__(self, x):
            for layer in self.layers:
                x = x + jnp.tanh(layer(x))
            return x

    def grad_fn(model, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        norm = jnp.sum(grads["layers"][0]["kernel"][...] ** 2) if read_twice else 0.0
        return (loss, norm), grads

    def step(model, optimizer, x):
        sliced = P("data") if read_twice else None
        out, grads = mm.microbatch(grad_fn, 0, 4, 1, reduce="mean", arg_shardings=sliced)(model, x)
        optimizer.update(model, grads)
        return out

    spec = P() if read_twice else P("data")
    rules = {mm.path("layers", range(2 * n, 2 * n + 2)): (task, spec) for n, task in enumerate(tasks)}
    with mesh:
        model = born(Two, mm.TaskSharding(rules))
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))(model)
        notes = mm.jit(step).program(model, optimizer, np.ones((8, 8), np.float32)).notes
    expected = ["the sum that updates 0.layers.0.kernel is reduced over its mesh in every microbatch"]
    assert [note.split(":")[0] for note in notes] == (expected if read_twice else [])


def test_a_norm_of_as_many_tokens_as_its_scale_has_numbers_is_not_noted():
    """One number for each token, which the scale's gradient is multiplied by, is no sum for the scale."""
    mesh, tasks = pipeline(2, 2, axes=("model",))

    class Normed(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.first, self.second, self.third = (nnx.Linear(8, 8, rngs=rngs) for _ in range(3))

        def __call__(self, x):
            x = self.second(self.norm(self.first(x)))
            return self.third(mm.with_sharding_constraint(x, P(None, None, "model")))

    grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
    with mesh:
        model = born(Normed, place(tasks, ["norm", "first", "second"], ["third"]))
        step = mm.jit(mm.microbatch(grad_fn, 0, 2, 1, reduce="mean"))
        assert not step.program(model, np.ones((8, 4, 8), np.float32)).notes


def notes_of(layer, sliced, size):
    """The notes of a step over two layers, on two stages of two devices, for a batch `sliced` so."""
    mesh, tasks = pipeline(2, 2, axes=("data",))

    class Two(nnx.Module):
        def __init__(self):
            self.first, self.second = layer(nnx.Rngs(0)), layer(nnx.Rngs(1))

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    def step(model, x):
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        loss, grads = mm.microbatch(grad_fn, 0, size, 1, reduce="mean", arg_shardings=sliced)(model, x)
        return loss, grads

    with mesh:
        model = born(Two, place(tasks, ["first"], ["second"]))
        return mm.jit(step).program(model, np.ones((12, 6, 6, 4), np.float32)).notes


def convolution(rngs):
    return nnx.Conv(4, 4, (3, 3), rngs=rngs)


def dense(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def test_notes_are_of_sums_over_sharded_values():
    """What is not taken apart is noted where it is sharded, and else not."""
    assert "'conv_general_dilated'" in " ".join(notes_of(convolution, P("data"), 4))
    assert not notes_of(convolution, None, 4)


def test_a_microbatch_that_does_not_divide_is_noted():
    assert "the 3 values that it sums up do not divide over data=2" in " ".join(notes_of(dense, P("data"), 3))
    assert not notes_of(dense, P("data"), 4)


def test_a_sum_of_a_thousand_terms():
    """The gradient of a weight that is used as often: more than Python goes down in one another."""

    def gradient(x, y):
        terms = [x.T @ y for _ in range(1000)]
        return sum(terms[1:], terms[0])

    jaxpr = jax.make_jaxpr(gradient)(jnp.ones((4, 2)), jnp.ones((4, 2)))
    rows = dict.fromkeys(jaxpr.jaxpr.invars, (("data",), ()))
    follow(jaxpr.jaxpr.eqns, rows)
    equations = [Equation(e, "") for e in jaxpr.jaxpr.eqns]
    sums = partial_sums.PartialSums(equations, jaxpr.jaxpr.outvars, rows)
    assert sums.plan(jaxpr.jaxpr.outvars[0], {"data": 2}) == ((("data",), 2),)
    assert len(sums.chosen) == 1999 and len(sums.contracted) == 1000
