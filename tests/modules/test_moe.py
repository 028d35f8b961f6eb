"""Mixture of experts against a loop over tokens and experts, and divided over a mesh."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import mmnnx as mm
from mmnnx.modules.moe import MoE
from mmnnx.mpmd.ir.flops import count_flops
from tests.mpmd.parity import assert_same, pipeline, values
from tests.slow import all_but, few, grid

WIDTH, MLP, EXPERTS = 8, 12, 4


def build(experts: int = EXPERTS, top_k: int = 2, *, seed: int = 0, cls: type = MoE, **options) -> MoE:
    router = nnx.initializers.normal(1.0)  # far from even
    return cls(WIDTH, MLP, experts, top_k, router_init=router, rngs=nnx.Rngs(seed), **options)


call = nnx.jit(lambda moe, x: moe(x))


def inputs(shape=(3, 10, WIDTH), seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(moe: MoE, x: jax.Array, capacity: int | None = None):
    """The output and the dropped assignments, one token and one expert at a time, in float64."""
    gate, up, down, router = (
        np.asarray(w[...], np.float64) for w in (moe.gate, moe.up, moe.down, moe.router.kernel)
    )
    x = np.asarray(x, np.float64)
    y, dropped = np.zeros_like(x), 0
    for row, tokens in enumerate(x):
        taken = np.zeros(moe.experts, int)
        scores = np.exp(tokens @ router)
        scores /= scores.sum(-1, keepdims=True)
        order = np.argsort(-scores, axis=-1)[:, : moe.top_k]
        for choice in range(moe.top_k):
            for position, token in enumerate(tokens):
                chosen = order[position]
                expert = chosen[choice]
                if capacity is not None and taken[expert] == capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                weight = scores[position, expert]
                if moe.top_k > 1:
                    weight /= scores[position, chosen].sum()
                hidden = silu(token @ gate[expert]) * (token @ up[expert])
                y[row, position] += weight * (hidden @ down[expert])
    return y, dropped / (x.shape[0] * x.shape[1] * moe.top_k)


@few(1)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_dropless_is_the_loop(top_k):
    moe, x = build(top_k=top_k), inputs()
    y, aux = call(moe, x)
    expected, _ = by_hand(moe, x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert aux.dropped == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype, atol", [(jnp.float16, 2e-2), (jnp.float64, 1e-6)])
def test_other_dtypes(dtype, atol):
    """Of float64, too, the router computes in float32."""

    @nnx.jit
    @nnx.grad(has_aux=True)
    def gradient(moe, x):
        y = moe(x)[0]
        return y.astype(jnp.float32).sum(), y

    with jax.enable_x64(True):
        moe, x = build(param_dtype=dtype), inputs().astype(dtype)
        grads, y = gradient(moe, x)
        same = build()
        nnx.update(same, jax.tree.map(lambda v: v.astype(jnp.float32), nnx.state(moe)))
        expected, _ = gradient(same, x.astype(jnp.float32))
    assert y.dtype == dtype and grads.up[...].dtype == dtype
    np.testing.assert_allclose(y, by_hand(moe, x)[0], atol=atol)
    for name in ("gate", "up", "down"):
        np.testing.assert_allclose(grads[name][...], expected[name][...], atol=20 * atol)


@pytest.mark.parametrize("shape", [(0, 3, WIDTH), (2, 0, WIDTH)])
@pytest.mark.parametrize("factor", [None, 1.25])
def test_no_tokens(shape, factor):
    with pytest.raises(ValueError, match="with at least one token, not"):
        build(capacity_factor=factor)(jnp.zeros(shape))


@few(2)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.3, 0.75, 1.25])
def test_capacity_drops_as_the_loop_does(top_k, factor):
    moe, x = build(top_k=top_k, capacity_factor=factor), inputs()
    y, aux = call(moe, x)
    expected, dropped = by_hand(moe, x, moe.capacity(10))
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(aux.dropped, dropped, atol=1e-6)
    assert dropped < 1 and (dropped > 0 or factor > 1)


def test_capacity_is_an_even_share_times_the_factor_and_never_more_than_all():
    assert build(capacity_factor=1.0).capacity(10) == 5
    assert build(capacity_factor=1.25).capacity(10) == 7  # 6.25, rounded up
    assert build(capacity_factor=0.01).capacity(10) == 1
    assert build(capacity_factor=50.0).capacity(10) == 10


def test_with_room_for_all_capacity_is_dropless():
    x = inputs()
    y, aux = call(build(capacity_factor=EXPERTS / 2), x)
    np.testing.assert_allclose(y, call(build(), x)[0], atol=1e-5)
    assert aux.dropped == 0


def test_rows_do_not_take_each_others_slots():
    moe, x = build(capacity_factor=0.5), inputs()
    np.testing.assert_allclose(call(moe, x)[0][1:], call(moe, x[1:])[0], atol=1e-6)


def reference(weights, x, top_k: int = 2):
    """The dropless layer as a dense formula."""
    gate, up, down, router = weights
    p = jax.nn.softmax(x @ router)
    least = jnp.sort(p, axis=-1)[..., -top_k, None]
    p = jnp.where(p >= least, p, 0)
    p = p / p.sum(-1, keepdims=True)
    each = [(jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e] * p[..., e, None] for e in range(EXPERTS)]
    return sum(each)


def weights_of(moe: MoE):
    return tuple(w[...] for w in (moe.gate, moe.up, moe.down, moe.router.kernel))


@pytest.mark.slow
def test_gradients_are_those_of_a_dense_formula():
    moe, x = build(), inputs()
    to_scalar = lambda y: jnp.sum(jnp.sin(y))
    grad = jax.jit(jax.grad(lambda w, x: to_scalar(reference(w, x)), argnums=(0, 1)))
    expected = grad(weights_of(moe), x)
    grads, dx = nnx.jit(nnx.grad(lambda m, x: to_scalar(m(x)[0]), argnums=(0, 1)))(moe, x)
    got = (tuple(g[...] for g in (grads.gate, grads.up, grads.down, grads.router.kernel)), dx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


@pytest.mark.parametrize(
    "options", all_but([{"capacity_factor": 0.6}], [{}, {"capacity_factor": 0.6}, {"top_k": 1}])
)
def test_gradients_are_finite_differences(options):
    """Of outputs and losses; nudges too small to change what is chosen."""
    moe, x = build(**options), inputs((2, 5, WIDTH))
    graphdef, state = nnx.split(moe)

    @jax.jit
    def run(state, x):
        y, aux = nnx.merge(graphdef, state)(x)
        return y, aux.load_balancing, aux.router_z

    check_grads(run, (state, x), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["expert", None, "data"])
def test_the_gradient_of_a_gradient_is_that_of_a_dense_formula(axis):
    """On one device, and over a mesh that has the experts divided, or each token's with another device."""
    moe, x = build(), inputs((2, 4, WIDTH))

    def penalty(f, *args):
        dx = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums=1)(*args)
        return jnp.sum(dx**2)

    expected = jax.jit(jax.grad(partial(penalty, reference)))(weights_of(moe), x)
    if axis:
        mesh = jax.make_mesh((2,), (axis,))
        task = mm.Task("moe", mesh=mesh, logical_axes={"expert": "expert"} if axis == "expert" else {})
        moe = mm.jit(nnx.clone, out_shardings=mm.TaskSharding({...: task}))(moe)
    graphdef, state = nnx.split(moe)
    of_state = partial(penalty, lambda state, x: nnx.merge(graphdef, state)(x)[0])
    grads = mm.jit(jax.grad(of_state))(state, x)
    got = weights_of(nnx.merge(graphdef, grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


@pytest.mark.slow
def test_the_router_of_a_single_choice_learns():
    grads = nnx.grad(lambda m, x: jnp.sum(m(x)[0] ** 2))(build(top_k=1), inputs())
    assert jnp.abs(grads.router.kernel[...]).max() > 1e-3


def test_losses_are_the_formulas_of_the_papers():
    moe, x = build(), inputs()
    logits = np.asarray(x, np.float64) @ np.asarray(moe.router.kernel[...], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1)[..., :2].reshape(-1)
    fraction = np.bincount(chosen, minlength=EXPERTS) / chosen.size
    aux = call(moe, x)[1]
    np.testing.assert_allclose(aux.fraction, fraction, atol=1e-6)
    np.testing.assert_allclose(aux.load_balancing, EXPERTS * fraction @ p.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(aux.router_z, np.mean(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)


def test_the_loss_of_an_even_load_is_one_and_of_a_lone_expert_as_many_as_there_are():
    even, lone = build(top_k=EXPERTS), build(top_k=1)
    np.testing.assert_allclose(call(even, inputs())[1].load_balancing, 1, rtol=1e-6)
    kernel = jnp.zeros((WIDTH, EXPERTS)).at[:, 0].set(50.0)
    lone.router.kernel.set_value(kernel)
    aux = call(lone, jnp.ones((2, 3, WIDTH)))[1]
    np.testing.assert_allclose(aux.load_balancing, EXPERTS, rtol=1e-6)
    np.testing.assert_array_equal(aux.fraction, [1, 0, 0, 0])


def test_bfloat16_computes_in_it_but_routes_in_float32():
    moe, x = build(dtype=jnp.bfloat16, capacity_factor=2.0), inputs()
    y, aux = call(moe, x)
    assert (y.dtype, aux.router_z.dtype, moe.gate.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), by_hand(moe, x)[0], atol=0.05)
    half = build(param_dtype=jnp.bfloat16)
    assert {w.dtype for w in weights_of(half)} == {jnp.dtype("bfloat16")}


def test_initialisers_and_names_are_those_given():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    names = dict(in_axes=("e", "d", "m"), out_axes=("e", "m", "d"), router_axes=(None, "e"))
    moe = build(kernel_init=ones, out_init=zeros, **names)
    assert (moe.gate[...] == 1).all() and (moe.up[...] == 1).all() and (moe.down[...] == 0).all()
    task = mm.Task("t", logical_axes={"e": "model"}, mesh=jax.make_mesh((2,), ("model",)))
    placed = mm.TaskSharding({...: task})
    assert placed.lookup(("gate",), moe.gate).sharding.spec == P("model", None, None)
    assert placed.lookup(("down",), moe.down).sharding.spec == P("model", None, None)
    assert placed.lookup(("kernel",), moe.router.kernel).sharding.spec == P(None, "model")


@pytest.mark.slow
def test_a_new_expert_keeps_the_scale_of_its_input_whatever_the_number_of_experts():
    """The experts' axis is no fan-in."""
    for experts in (2, 16):
        std = jnp.std(MoE(64, 32, experts, rngs=nnx.Rngs(0)).gate[...])
        np.testing.assert_allclose(std, 64**-0.5, rtol=0.1)


class Uniform(MoE):
    def route(self, probabilities):
        weights, chosen = super().route(probabilities)
        return jnp.full_like(weights, 1 / self.top_k), chosen


class Ragged(MoE):
    """The dropless layer as `jax.lax.ragged_dot` has it."""

    def __call__(self, x):
        tokens = x.reshape(-1, self.width)
        weights, chosen = self.route(jax.nn.softmax(self.router(tokens)))
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts)
        product = lambda rows, w: jax.lax.ragged_dot(rows, w[...], sizes)
        rows = tokens[order // self.top_k]
        out = product(jax.nn.silu(product(rows, self.gate)) * product(rows, self.up), self.down)
        out = out * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(tokens).at[order // self.top_k].add(out).reshape(x.shape)


@pytest.mark.slow
def test_route_can_be_overridden():
    x = inputs()
    moe = build(cls=Uniform, top_k=EXPERTS)
    gate, up, down, _ = weights_of(moe)
    each = [(jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e] for e in range(EXPERTS)]
    np.testing.assert_allclose(moe(x)[0], sum(each) / EXPERTS, atol=1e-5)


class Linear(MoE):
    @staticmethod
    def activation(gate, up):
        return up


@pytest.mark.slow
def test_the_activation_can_be_overridden():
    x = inputs()
    moe = build(cls=Linear, top_k=1)
    p = jax.nn.softmax(moe.router(x))
    expert = p.argmax(-1)
    expected = jnp.einsum("gtd,gtdm,gtmo,gt->gto", x, moe.up[...][expert], moe.down[...][expert], p.max(-1))
    np.testing.assert_allclose(moe(x)[0], expected, atol=1e-5)


def test_it_is_what_ragged_dot_gives():
    x = inputs()
    np.testing.assert_allclose(call(build(), x)[0], call(build(cls=Ragged), x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 0.75])
def test_several_at_once_are_each_by_itself(factor):
    """Under `nnx.vmap`, with the gradients."""
    make = lambda key: MoE(WIDTH, MLP, EXPERTS, capacity_factor=factor, rngs=nnx.Rngs(key))
    stacked, x = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3)), inputs((3, 2, 5, WIDTH))
    loss = lambda moe, x: jnp.sum(jnp.sin(moe(x)[0]))
    values, grads = nnx.vmap(nnx.value_and_grad(loss))(stacked, x)
    for n in range(3):
        graphdef, state = nnx.split(stacked)
        own = nnx.merge(graphdef, jax.tree.map(operator.itemgetter(n), state))
        value, gradient = nnx.value_and_grad(loss)(own, x[n])
        np.testing.assert_allclose(values[n], value, rtol=1e-5)
        np.testing.assert_allclose(grads.down[...][n], gradient.down[...], atol=1e-5)


@pytest.mark.parametrize(
    "over, factor",
    grid(
        [
            ("expert", (2, 2), {"expert": "expert"}),
            ("data", (2,), {"expert": "data", "batch": "data"}),
            ("expert", (4,), {"expert": "expert"}),
            ("model", (4,), {"expert": "model", "mlp": "model"}),
            ("expert", (2, 2), {"expert": "expert", "batch": "data"}),
            ("expert", (2, 2), {"expert": "expert", "sequence": "data"}),
        ],
        [0.75, None],
        step=5,
    ),
)
def test_experts_over_a_mesh_axis_are_the_same(over, factor):
    """Output, losses and gradients, in a task and out of one, and each device holds its own experts."""
    axis, sizes, rules = over
    names = (axis, "data")[: len(sizes)]  # without a rule "data" divides the batch as well
    mesh = jax.make_mesh(sizes, names)
    task = mm.Task("moe", mesh=mesh, logical_axes=rules)
    x = inputs((4, 10, WIDTH))

    def loss(moe, x):
        y, aux = moe(x)
        return jnp.sum(jnp.sin(y)) + aux.load_balancing + aux.router_z, (y, aux)

    grad = nnx.value_and_grad(loss, has_aux=True)
    moe = build(capacity_factor=factor)
    expected = nnx.jit(grad)(moe, x)
    placed = mm.jit(nnx.clone, out_shardings=mm.TaskSharding({...: task}))(moe)
    assert placed.gate.sharding.spec == P(axis, None, None)
    assert placed.gate.addressable_shards[0].data.shape == (EXPERTS // sizes[0], WIDTH, MLP)
    for fun in (mm.task(grad, task=task), grad):
        got = mm.jit(lambda moe, x, fun=fun: fun(moe, x))(placed, x)
        assert_same(got, expected, rtol=2e-5)
        assert values(got).keys() == values(expected).keys()


def compiled_text(placed: MoE, task: mm.Task, x: jax.Array) -> str:
    run = mm.task(lambda moe, x: moe(x)[0], task=task)
    return mm.jit(lambda moe, x: run(moe, x)).lower(placed, x).compile().as_text()


@few(1)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_no_weight_of_an_expert_travels(factor):
    mesh = jax.make_mesh((4,), ("expert",))
    task = mm.Task("moe", mesh=mesh, logical_axes={"expert": "expert"})
    placed = mm.jit(lambda: build(capacity_factor=factor), out_shardings=mm.TaskSharding({...: task}))()
    text = compiled_text(placed, task, inputs())
    assert "all-reduce" in text and "all-gather" not in text


@pytest.mark.parametrize(
    "factor, rules, again", [(1.0, {"expert": "model"}, 0), (None, {"expert": "model"}, 2), (None, {}, 0)]
)
def test_what_a_backward_on_its_own_computes(factor, rules, again):
    """Two products for each of the forward's three; and two of these, where a device may get all tokens."""
    mesh, tasks = pipeline(2, 2)
    tasks = [dataclasses.replace(task, logical_axes=rules) for task in tasks]
    make = lambda: nnx.List([MoE(32, 64, 4, 2, capacity_factor=factor, rngs=nnx.Rngs(n)) for n in range(2)])
    with mesh:
        layers = mm.jit(make, out_shardings=mm.TaskSharding({mm.path(n): t for n, t in enumerate(tasks)}))()
        loss = lambda layers, x: (layers[1](layers[0](x)[0])[0] ** 2).sum()
        program = mm.jit(nnx.grad(loss)).program(layers, jnp.ones((2, 64, 32)))
    on_first = [f for f in program.fragments if program.names[f.mesh] == "stage0"]
    forward, backward = filter(None, (count_flops(f.jaxpr).total() for f in on_first))
    assert backward / forward == pytest.approx((6 + again) / 3, rel=0.03)  # what weighs their sums is little
    hidden = [v for v in on_first[0].jaxpr.jaxpr.outvars if v.aval.shape[-1:] == (64,)]
    assert len(hidden) == (0 if again else 2)


def test_a_zero_bubble_schedule_has_the_gradients_of_kernels_wait():
    """Half of a backward: three products of six."""
    mesh, tasks = pipeline(2, 2)
    make = lambda: nnx.List([MoE(32, 64, 4, 2, capacity_factor=1.0, rngs=nnx.Rngs(n)) for n in range(2)])
    loss = lambda layers, x: (layers[1](layers[0](x)[0])[0] ** 2).sum()
    grad = mm.microbatch(nnx.grad(loss), size=2, dim=0, argnum=1, schedule="zero-bubble-h1")
    with mesh:
        layers = mm.jit(make, out_shardings=mm.TaskSharding({mm.path(n): t for n, t in enumerate(tasks)}))()
        program = mm.jit(lambda layers, x: grad(layers, x)).program(layers, jnp.ones((8, 64, 32)))
    flops = {program.labels[f]: count_flops(f.jaxpr).total() for f in program.fragments}
    for stage in ("stage0", "stage1"):
        parts = [flops[f"{stage} backward-{part}"] for part in ("input", "weight")]
        assert parts == pytest.approx([flops[f"{stage} forward"]] * 2, rel=0.03)


@pytest.mark.parametrize("factor", [1.0, None])
def test_devices_that_divide_a_sequence_divide_the_work(factor):
    """Of a lone row: each token, or each slot of an expert, is of one device."""
    mesh = jax.make_mesh((4,), ("context",))
    task = mm.Task("moe", mesh=mesh, logical_axes={"sequence": "context"})
    moe, x = build(capacity_factor=factor), inputs((1, 16, WIDTH))
    graphdef, state = nnx.split(moe)
    call = lambda state, x: nnx.merge(graphdef, state)(x)[0]
    (fragment,) = mm.jit(mm.task(call, task=task)).program(state, x).fragments
    shape = "[1,4,2,8]" if factor else "[8,8]"  # of 8 slots an expert, or 32 choices
    assert shape in str(fragment.jaxpr)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(top_k=0), "top_k=0 of 4 experts: use 1 to 4"),
        (dict(top_k=5), "top_k=5 of 4 experts"),
        (dict(capacity_factor=0.0), "capacity_factor=0.0 leaves no slots"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        build(**options)


@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 3, WIDTH + 1)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"x is \[batch, sequence, 8\] with at least one token, not"):
        build()(jnp.ones(shape))
