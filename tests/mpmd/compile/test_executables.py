"""Fragments are compiled at once where they can be, equal ones once, and not again at a second start."""

import dataclasses
import gc
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile import executables, gc_pause
from mmnnx.mpmd.compile.buffer_shardings import BufferShardings, replicated
from mmnnx.mpmd.compile.executables import Executable
from mmnnx.mpmd.compile.lower import lower
from mmnnx.mpmd.runtime import arguments
from tests.mpmd.parity import assert_same, born, pipeline

ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Chain(nnx.Module):
    """Layers that are alike; `between` is applied to what layer n makes."""

    def __init__(self, layers, between=lambda x, n: jnp.tanh(x)):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(layers))
        self.between = between

    def __call__(self, x):
        for n, layer in enumerate(self.layers):
            x = self.between(layer(x), n)
        return x


def train_step(microbatches):
    def step(model, optimizer, x):
        def loss_fn(model, x):
            return jnp.mean(model(x) ** 2)

        size = len(x) // microbatches
        grad_fn = nnx.value_and_grad(loss_fn)
        loss, grads = mm.microbatch(grad_fn, dim=0, size=size, argnum=1, per_call=1)(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def make_optimizer(model):
    return nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def on_stages(stages, per_stage=()):
    """A MultiMesh, and the placement of one layer on each of its stages."""
    mesh, tasks = pipeline(stages, *per_stage)
    return mesh, mm.TaskSharding({mm.path("layers", n): (task, None) for n, task in enumerate(tasks)})


@pytest.fixture
def compiles(monkeypatch, compiled_anew, no_folder):
    """Grows by the name of every program that is compiled for a fragment, without JAX's cache on disk."""
    names = []
    compile_lowered = executables.compile_lowered

    def watched(lowered, options):
        names.append(re.search(r"module @jit_(\w+)", lowered.stage.as_text())[1])
        return compile_lowered(lowered, options)

    monkeypatch.setattr(executables, "compile_lowered", watched)
    return names


@pytest.mark.parametrize(
    "per_stage",
    [(), pytest.param((2,), marks=pytest.mark.slow)],
    ids=["one device", "two devices"],
)
def test_equal_stages_are_compiled_once(compiles, per_stage):
    """Those in the middle of a pipeline have each a program of their own, and all of them one compilation;
    what it computes on each is what one device computes."""
    mesh, placement = on_stages(4, per_stage)
    whole = Chain(4)
    whole_optimizer = make_optimizer(whole)
    with mesh:
        model = born(lambda: Chain(4), placement)
        optimizer = mm.jit(make_optimizer)(model)
        compiles.clear()
        step = mm.jit(train_step(2), donate_argnums=(0, 1))
        count = 0
        for n in range(3):
            expected = nnx.jit(train_step(2))(whole, whole_optimizer, X + n)
            old = [layer.kernel[...] for layer in model.layers]
            assert_same(step(model, optimizer, X + n), expected)
            assert all(x.is_deleted() for x in old)
            count = count or len(compiles)
        assert len(compiles) == count  # by the first step alone
        assert_same(model, whole)
        fragments = step.program(model, optimizer, X).fragments
    middle = [f for f in fragments if f.task in ("stage1", "stage2")]
    assert len(middle) >= 6
    assert sum(name.startswith(("stage1", "stage2")) for name in compiles) <= len(middle) / 2


@pytest.mark.slow
def test_no_growth_with_stages_and_microbatches(compiles, monkeypatch):
    counts = []
    for stages, microbatches in ((4, 2), (4, 4), (8, 2)):
        mesh, placement = on_stages(stages)
        with mesh:
            model = born(lambda n=stages: Chain(n), placement)
            optimizer = mm.jit(make_optimizer)(model)
            compiles.clear()
            monkeypatch.setattr(executables, "_in_use", WeakValueDictionary())
            mm.jit(train_step(microbatches))(model, optimizer, X)
        counts.append(len(compiles))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.slow
def test_what_another_program_has_is_not_compiled_again(compiles, fast_gc):
    """A step whose counters come from elsewhere the second time, and the same step once more; as long as a
    program that has it is in use."""
    mesh, placement = on_stages(4)
    with mesh:
        model = born(lambda: Chain(4), placement)
        step = mm.jit(train_step(2))
        optimizer = make_optimizer(model)  # outside of mm.jit, so that its counters are on one device
        step(model, optimizer, X)
        before, first = optimizer.step[...].sharding, len(compiles)
        step(model, optimizer, X)
        mm.jit(train_step(2))(model, optimizer, X)
        assert len(compiles) == first > 0
        assert before.device_set == set(mesh.mesh.devices.flat)
        assert int(optimizer.step[...]) == 3
        del step, optimizer
        gc.collect()
        optimizer = mm.jit(make_optimizer)(model)
        mm.jit(train_step(2))(model, optimizer, X)
        assert len(compiles) > first


@pytest.mark.slow
def test_programs_on_other_meshes(compiles):
    """What one program has on two meshes another has on two of which one is new."""
    runs = []
    for first in range(3):
        mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[first : first + 2])
        tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
        placement = mm.TaskSharding({mm.path("layers", n): (task, None) for n, task in enumerate(tasks)})
        with mesh:
            model = born(lambda: Chain(2), placement)
            optimizer = mm.jit(make_optimizer)(model)
            compiles.clear()
            step = mm.jit(train_step(2))
            runs.append([step(model, optimizer, X + n) for n in range(2)])
            assert bool(compiles) == (first == 0)
            runs[-1].append(step)
    for *losses, _ in runs[1:]:
        assert_same(losses, runs[0][:2])


def kernels(compiled):
    """The different computations of a program that XLA makes kernels of."""
    fused = re.findall(r"^%\S*(?:fused|wrapped)\S* .*?^}", compiled.as_text(), re.MULTILINE | re.DOTALL)
    return {re.sub(r"\.\d+|, metadata=\{.*?\}", "", text) for text in fused}


def test_the_slices_of_a_batch_are_one_kernel(monkeypatch):
    made = []
    monkeypatch.setattr(executables, "Executable", lambda *args: made.append(args[0]) or Executable(*args))
    counts = []
    for microbatches in (2, 16):
        mesh, placement = on_stages(2)
        with mesh:
            model = born(lambda: Chain(2), placement)
            optimizer = mm.jit(make_optimizer)(model)
            made.clear()
            mm.jit(train_step(microbatches))(model, optimizer, np.resize(X, (2 * microbatches, 8)))
        counts.append(sorted(len(kernels(compiled)) for compiled in made))
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def test_constants_are_put_on_their_mesh_once(monkeypatch):
    """A table that a model closes over is no argument: it does not travel at every call."""
    table = np.arange(8, dtype=np.float32)
    put, puts = arguments.put, []
    monkeypatch.setattr(arguments, "put", lambda x, to: puts.append(x) or put(x, to))
    mesh, placement = on_stages(2)
    with mesh:
        model = born(lambda: Chain(2, lambda x, n: x + jnp.asarray(table)), placement)
        f = mm.jit(lambda model, x: model(x))
        expected = Chain(2, lambda x, n: x + table)(X)
        for _ in range(3):
            assert_same(f(model, X), expected)
    assert sum(x is X for x in puts) == 3
    assert sum(np.array_equal(x, table) for x in puts) == 2  # once for each stage


def test_stages_that_are_only_alike_are_not_one(compiles):
    """The same operations with other constants are another program."""
    make = lambda: Chain(4, lambda x, n: x * jnp.float32(n + 1))
    mesh, placement = on_stages(4)
    with mesh:
        model = born(make, placement)
        compiles.clear()
        assert_same(mm.jit(lambda model, x: model(x))(model, X), make()(X))
    assert len(compiles) == 4


def test_types_that_the_text_of_a_program_does_not_tell():
    """A weak type from another; a random key from its words."""

    class Model(nnx.Module):
        def __init__(self):
            words = lambda: nnx.Variable(jnp.arange(2, dtype=jnp.uint32).reshape(1, 2))
            self.weak, self.strong = nnx.Variable(jnp.full(4, 2.0)), nnx.Variable(jnp.arange(4.0))
            self.words, self.more = words(), words()
            self.key, self.last = nnx.Variable(jax.random.key(0).reshape(1)), words()

    def step(m):
        m.key[...] = jax.random.wrap_key_data(m.words[...] * 2)
        m.last[...] = m.more[...] * 2
        return jnp.sin(m.strong[...]), jnp.sin(m.weak[...])

    mesh, tasks = pipeline(2)
    rules = {mm.path({"strong", "words", "key"}): (tasks[0], P()), mm.path({"weak", "more"}): (tasks[1], P())}
    with mesh:
        model = mm.jit(Model, out_shardings=mm.TaskSharding(rules | {mm.path("last"): (tasks[1], P(None))}))()
        strong, weak = mm.jit(step)(model)
    assert (strong.weak_type, weak.weak_type) == (False, True)
    assert jnp.issubdtype(model.key[...].dtype, jax.dtypes.prng_key) and model.key[...].shape == (1,)
    assert (model.last[...].dtype, model.last[...].shape) == (jnp.uint32, (1, 2))


def test_callbacks_keep_their_own_programs(compiles):
    """A callback belongs to one executable: every stage calls its own."""
    called = []

    def between(x, n):
        def double(x):
            called.append(n)
            return 2 * x

        return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    mesh, placement = on_stages(4)
    with mesh:
        model = born(lambda: Chain(4, between), placement)
        compiles.clear()
        made = mm.jit(lambda model, x: model(x))(model, X)
        assert_same(made, Chain(4, lambda x, n: 2 * x)(X))
    assert sorted(called) == [0, 1, 2, 3]
    assert len(compiles) == 4


def test_on_one_device_each_nothing_waits(compiles):
    """Where no sharding is open, every fragment can be compiled from the start."""
    mesh, placement = on_stages(4)
    with mesh:
        model = born(lambda: Chain(4), placement)
        program = mm.jit(train_step(2)).program(model, mm.jit(make_optimizer)(model), X)
    fixed = replicated(program, {})
    ready = BufferShardings(program, fixed).ready
    assert {call.fragment for call in ready} == set(program.fragments)
    assert len(ready) == len(program.fragments)


def test_jax_logs_what_is_compiled(compiles, caplog):
    """Also in the threads that compile, for which `jax.log_compiles` does not hold of itself."""
    mesh, tasks = pipeline(2)
    halves = [mm.task(fun, task=task) for fun, task in zip((jnp.sin, jnp.tanh), tasks)]
    with mesh, caplog.at_level(logging.WARNING), jax.log_compiles():
        mm.jit(lambda x: halves[1](halves[0](x)))(X)
    finished = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert len(compiles) == 2 and {*compiles} <= {*finished}


def test_what_xla_refuses_is_raised(monkeypatch, compiled_anew):
    class Refused:
        def compile(self, options):
            raise RuntimeError("out of registers")

    monkeypatch.setattr(
        executables, "lower", lambda *args: dataclasses.replace(lower(*args), stage=Refused())
    )
    mesh, placement = on_stages(2)
    with mesh, pytest.raises(RuntimeError, match="out of registers"):
        mm.jit(lambda: Chain(2), out_shardings=placement)()


def start(folder=""):
    """A process that trains with JAX's compilation cache in a folder: its losses, how many programs XLA
    compiled or JAX loaded, and hits and misses of JAX's own entries."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).parent / "train_once.py"
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    """All of a pipeline comes out of JAX's persistent compilation cache, and computes the same. What stages
    share is compiled once with the cache as without it, and is one entry for all."""
    without, first, second = start(), start(tmp_path), start(tmp_path)
    assert first["hits"] == 0 and first["misses"] == first["programs"] == without["programs"] > 10
    assert second["misses"] == 0 and second["hits"] == second["programs"] < first["programs"]
    assert without["losses"] == first["losses"] == second["losses"]
    entries = [path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")]
    own = sum(name.startswith("mmnnx-") for name in entries)
    assert own == first["programs"] - second["programs"] and len(entries) == first["misses"] + own


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:20])])
def test_a_cache_without_own_entries(tmp_path, spoil):
    """What only JAX's own entries are left of cannot be loaded for others, and is compiled for them."""
    first = start(tmp_path)
    for path in tmp_path.glob("mmnnx-*-cache"):
        spoil(path)
    second, third = start(tmp_path), start(tmp_path)
    assert second["hits"] == first["misses"] and second["misses"] > 0
    assert third["misses"] == 0
    assert first["losses"] == second["losses"] == third["losses"]


def test_the_collector_is_back_after_a_trace():
    assert gc_pause.gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_pause.gc_paused(), gc_pause.gc_paused():
        assert not gc_pause.gc.isenabled()
        raise ZeroDivisionError
    assert gc_pause.gc.isenabled()
    gc_pause.gc.disable()
    try:
        with gc_pause.gc_paused():
            pass
        assert not gc_pause.gc.isenabled()  # whoever switched it off wants it off
    finally:
        gc_pause.gc.enable()
