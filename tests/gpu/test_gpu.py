"""On a GPU: what CPU devices cannot show. `make test-gpu` runs these, and the tests of parity on one GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules import generate
from mmnnx.modules.attention import Attention
from mmnnx.modules.grouped_matmul import grouped_matmul
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.modules.moe_lm import MoELM, MoELMConfig
from mmnnx.train.checkpoint import Checkpoints
from tests.modules.test_grouped_matmul import assert_close, by_rows, computed, operands
from tests.mpmd.parity import assert_same, on_meshes

pytestmark = pytest.mark.gpu

SIZES = dict(vocab=512, layers=4, width=128, heads=4, kv_heads=2, mlp=256)
LMS = {
    "dense": (LM, LMConfig(**SIZES)),
    "bfloat16": (LM, LMConfig(**SIZES, dtype=jnp.bfloat16)),
    "cudnn": (LM, LMConfig(**SIZES, dtype=jnp.bfloat16, attention="cudnn")),
    "flash": (LM, LMConfig(**SIZES, dtype=jnp.bfloat16, attention="flash")),
    "remat": (LM, LMConfig(**SIZES, remat=True)),
    "experts": (MoELM, MoELMConfig(**SIZES, experts=4)),
    "experts in bfloat16": (MoELM, MoELMConfig(**SIZES, experts=4, dtype=jnp.bfloat16)),
}
MESH, TASKS = on_meshes(range(4))


def tokens(rows: int = 8, length: int = 128) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 512, (rows, length + 1), np.int32)


def loss_of(model, tokens):
    return model.loss(tokens)


def step(model, optimizer, tokens):
    """A step of microbatches of two rows."""
    grad_fn = mm.microbatch(nnx.value_and_grad(loss_of), dim=0, size=2, argnum=1, reduce="mean")
    loss, gradients = grad_fn(model, tokens)
    optimizer.update(model, gradients)
    return loss


def born(kind, config, tasks=None, seed: int = 0):
    """A model and its optimizer, in tasks or whole."""
    make = lambda: kind(config, rngs=nnx.Rngs(seed))
    jit = nnx.jit if tasks is None else mm.jit
    where = {} if tasks is None else {"out_shardings": mm.pipeline_sharding(nnx.eval_shape(make), tasks)}
    model = jit(make, **where)()
    rule = optax.adamw(1e-3, eps=1e-3)
    return model, jit(lambda model: nnx.Optimizer(model, rule, wrt=nnx.Param))(model)


def train(kind, config, tasks=None, steps: int = 3):
    """Losses, the model and its optimizer after some steps, in tasks or whole."""
    model, optimizer = born(kind, config, tasks)
    jitted = (nnx.jit if tasks is None else mm.jit)(step, donate_argnums=(0, 1))
    losses = [float(jitted(model, optimizer, tokens())) for _ in range(steps)]
    return losses, model, optimizer


def test_there_is_a_gpu():
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("name", LMS)
def test_language_models_train_as_whole(name):
    kind, config = LMS[name]
    losses, _, optimizer = train(kind, config, TASKS)
    want, _, of_whole = train(kind, config)
    tolerance = 1e-4 if config.dtype != jnp.bfloat16 else 0.05
    np.testing.assert_allclose(losses, want, rtol=tolerance)
    first = lambda optimizer: optimizer.opt_state[0].mu
    for (path, got), (_, expected) in zip(
        nnx.to_flat_state(first(optimizer)), nnx.to_flat_state(first(of_whole)), strict=True
    ):
        got, expected = (np.asarray(x.get_raw_value(), np.float64) for x in (got, expected))
        apart, size = np.linalg.norm(got - expected), np.linalg.norm(expected)
        assert apart <= tolerance * size, f"{path}: {apart} of {size}"


@pytest.mark.parametrize("implementation", ["xla", "cudnn", "flash"])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(causal=True, window=32), dict(segments=2)])
def test_attention_in_bfloat16_is_near_that_in_float32(implementation, options):
    """Values and gradients of four heads that share two keys and values."""
    options = dict(options)
    segments = options.pop("segments", None)
    ids = None if segments is None else jnp.repeat(jnp.arange(segments), 128 // segments)[None].repeat(2, 0)
    make = lambda implementation, dtype: Attention(
        256, heads=4, kv_heads=2, implementation=implementation, dtype=dtype, rngs=nnx.Rngs(0), **options
    )
    x = np.random.default_rng(0).standard_normal((2, 128, 256))

    def computed(implementation, dtype):
        graph, state = nnx.split(make(implementation, dtype))
        call = lambda state, x: nnx.merge(graph, state)(x, segment_ids=ids)
        y, back = jax.vjp(jax.jit(call), state, jnp.asarray(x, dtype))
        return [y, *jax.tree.leaves(jax.jit(back)(jnp.ones_like(y)))]

    got, expected = computed(implementation, jnp.bfloat16), computed("xla", jnp.float32)
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("sizes", [(300, 0, 212), (0, 1, 0, 500, 11), (0, 0, 0)])
def test_grouped_products_are_those_of_rows(sizes, dtype, tolerance):
    given = operands(sizes, 5, 64, 96, dtype)
    assert_close(jax.jit(computed)(*given), by_rows(*given), tolerance)
    assert grouped_matmul(*given[:3]).dtype == dtype


def test_tokens_are_those_of_the_whole():
    make = lambda: LM(LMConfig(**SIZES), rngs=nnx.Rngs(0))
    whole = nnx.jit(make)()
    split = mm.jit(make, out_shardings=mm.pipeline_sharding(nnx.eval_shape(make), TASKS))()
    prompt = tokens(4, 15)
    expected = generate(whole, prompt, 12)
    np.testing.assert_array_equal(generate(split, prompt, 12), expected)
    np.testing.assert_array_equal(generate(split, prompt, 12, in_flight=2), expected)


class Two(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("order", ["cpu, gpu", "gpu, cpu"])
def test_a_stage_on_the_host(order):
    """Its CPU devices are devices like others."""
    platforms = order.split(", ")
    devices = np.array([jax.devices(platform)[0] for platform in platforms])
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=devices)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
    placement = mm.TaskSharding({mm.path("first"): (tasks[0], P()), mm.path("second"): (tasks[1], P())})
    x = np.random.default_rng(0).standard_normal((8, 64), np.float32)

    def trained(jit, **where):
        model = jit(lambda: Two(nnx.Rngs(0)), **where)()
        optimizer = jit(lambda model: nnx.Optimizer(model, optax.adam(1e-2, eps=1e-2), wrt=nnx.Param))(model)

        @jit(donate_argnums=(0, 1))
        def step(model, optimizer, x):
            grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
            loss, gradients = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, reduce="mean")(model, x)
            optimizer.update(model, gradients)
            return loss

        return [float(step(model, optimizer, x)) for _ in range(3)], model

    with mesh:
        losses, model = trained(mm.jit, out_shardings=placement)
    expected, whole = trained(nnx.jit)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same(model, whole, 1e-4)
    for layer, platform in zip((model.first, model.second), platforms):
        assert {d.platform for d in layer.kernel.get_raw_value().devices()} == {platform}


@pytest.mark.parametrize("there", ["gpu", "cpu"])
def test_checkpoints(tmp_path, there):
    """What tasks on a GPU save is read by tasks there, and on the host."""
    _, model, optimizer = train(*LMS["dense"], TASKS, steps=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
    mesh = mm.MultiMesh(axis_sizes=(1,), axis_names=("stage",), devices=np.array(jax.devices(there)[:1]))
    tasks = [mm.Task(f"other{n}", mesh=mm.TaskMesh(devices=[0], axis_sizes=(1,) * n)) for n in (1, 2)]
    with mesh:
        other, its_optimizer = born(*LMS["dense"], tasks, seed=1)
        Checkpoints(tmp_path).restore({"model": other, "optimizer": its_optimizer})
    assert_same(other, model, 0)
    assert_same(its_optimizer, optimizer, 0)
    assert {d.platform for x in jax.tree.leaves(nnx.state(other)) for d in x.devices()} == {there}


def test_a_plan_of_tasks_on_one_device():
    """It counts the arrays of all tasks together at the worst moment, a profile those of each at its own."""
    _, model, optimizer = train(*LMS["dense"], TASKS, steps=1)
    jitted = mm.jit(step, donate_argnums=(0, 1))
    plan = mm.plan(jitted, model, optimizer, tokens())
    profile = jitted.program(model, optimizer, tokens()).profile(model, optimizer, tokens())
    assert plan.fits and plan.chip is not None and plan.device_kind == jax.devices()[0].device_kind
    (memory,) = plan.memory
    assert max(profile.peak_bytes.values()) < memory.arrays <= sum(profile.peak_bytes.values())
    assert profile.seconds > 0 and all(t > 0 for t in profile.costs.calls.values())


def test_the_update_overwrites_its_state():
    """After steps hardly more is in the memory than the state: nothing that was replaced is kept."""
    config = LMConfig(**SIZES | dict(width=1024, mlp=4096))
    _, model, optimizer = train(LM, config, TASKS, steps=2)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    assert nbytes <= jax.devices()[0].memory_stats()["bytes_in_use"] <= 1.5 * nbytes
