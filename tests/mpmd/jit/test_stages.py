"""What `.trace`, `.lower` and `.compile` of mm.jit return says all that the stages of JAX say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.modes import Pair
from tests.mpmd.parity import born, pipeline, place
from tests.slow import few

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def step(model, x):
    model.count[...] += 1
    loss, grads = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)
    return loss, grads


@pytest.fixture
def split():
    """A model over two meshes of two devices, whose second kernel is sharded."""
    mesh, tasks = pipeline(2, 2)
    rules = {
        mm.path("first"): (tasks[0], P()),
        mm.path("second", "kernel"): (tasks[1], P("model")),
        mm.path(...): (tasks[1], P()),
    }
    with mesh:
        yield born(Pair, mm.TaskSharding(rules))


def test_shapes_and_trees(mode):
    """The same under nnx.jit, with one program and with several."""
    model = mode.make(Pair)
    traced = mode.jit(step, donate_argnums=0).trace(model, X)
    lowered = traced.lower()
    compiled = lowered.compile()
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    results = shapes(nnx.jit(step).trace(Pair(), X).out_info)
    assert shapes(traced.out_info) == results
    assert [x.shape for x in jax.tree.leaves(lowered.args_info)] == [(), (4,), (4, 4), (3,), (4, 3), (2, 4)]
    assert lowered.donate_argnums == compiled.donate_argnums == (0, 1, 2, 3, 4)
    assert lowered.in_tree == compiled.in_tree == traced.in_tree
    assert lowered.out_tree == compiled.out_tree == jax.tree.structure(traced.out_info)
    if mode.jit is not nnx.jit:  # which has no such attributes, or raises another error in them
        assert shapes(lowered.out_info) == shapes(compiled.out_info) == results
        for stage in (traced, compiled):
            assert shapes(stage.args_info) == shapes(lowered.args_info)
        assert "dot_general" in str(traced.jaxpr)


@pytest.mark.parametrize("graph", [True, False])
def test_shardings_and_formats_are_those_of_arguments_and_results(split, graph):
    @mm.jit(graph=graph)
    def run(model, x, unread):
        model.count[...] += 1
        return model(x), model.second.kernel[...] * 2.0, unread, jnp.ones(3), model.first.bias[...]

    compiled = run.lower(split, X, X).compile()
    out = compiled(split, X, X)
    found = compiled.output_shardings
    returned = found[2] if graph else found[0]
    assert jax.tree.structure(returned) == jax.tree.structure(out)
    for sharding, x in zip(jax.tree.leaves(returned), out, strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim)
    assert returned[1].spec == P("model")
    (of_model, *_), _ = compiled.input_shardings
    flat = nnx.to_flat_state(nnx.state(split))
    assert len(flat) == 5
    for sharding, (_, variable) in zip(jax.tree.leaves(of_model), flat, strict=True):
        assert sharding.is_equivalent_to(variable.get_raw_value().sharding, variable.ndim)
    for shardings, formats in (
        (compiled.input_shardings, compiled.input_formats),
        (compiled.input_shardings, compiled.input_layouts),
        (found, compiled.output_formats),
    ):
        assert [f.sharding for f in jax.tree.leaves(formats)] == jax.tree.leaves(shardings)
    assert compiled.input_formats[0][1].layout.major_to_minor == (0, 1)
    assert [f.layout and f.layout.major_to_minor for f in compiled.output_formats[2 if graph else 0]] == [
        (0, 1),
        (0, 1),
        None,  # no program has it
        (0,),
        (0,),
    ]
    infos = jax.tree.leaves(compiled.out_info)
    assert [x.sharding for x in infos] == jax.tree.leaves(found)


def test_figures_of_fragments_and_their_sums():
    """Twice two layers of known sizes: each product counts once for each microbatch."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(Pair, place(tasks, ["first"], [...]))
        batch = jnp.ones((4, 4))

        @mm.jit
        def run(model, batch):
            return mm.microbatch(lambda model, x: model(x), dim=0, size=2, argnum=1, reduce="concat")(
                model, batch
            )

        lowered = run.lower(model, batch)
        compiled = lowered.compile()
        assert [*lowered.fragments] == [*run.program(model, batch).labels.values()]
    products = 4 * 2 * (4 * 4 + 4 * 3)
    for stage in (lowered, compiled):
        assert products <= stage.cost_analysis()["flops"] <= 1.5 * products
        assert stage.cost_analysis()["bytes accessed"] > 0
        assert not any("{" in key for key in stage.cost_analysis())  # of operands, which each fragment has
        assert all(isinstance(fragment.as_text(), str) for fragment in stage.fragments.values())
    each = [f.memory_analysis() for f in compiled.fragments.values()]
    total = compiled.memory_analysis()
    for field in ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes"):
        assert getattr(total, field) == sum(getattr(m, field) for m in each)
    assert total.argument_size_in_bytes >= 4 * (16 + 4 + 12 + 3)


def test_text(mode):
    model = mode.make(Pair)
    lowered = mode.jit(step).lower(model, X)
    with pytest.raises(ValueError, match="unknown dialect: nonsense"):
        lowered.as_text("nonsense")
    with pytest.raises(ValueError, match="unknown dialect: nonsense"):
        lowered.compiler_ir("nonsense")
    assert "stablehlo.dot_general" in lowered.as_text("stablehlo")
    assert "HloModule" in lowered.as_text(dialect="hlo")
    assert "loc(" in lowered.as_text("stablehlo", debug_info=True)
    assert lowered.compiler_ir("stablehlo") is not None
    text = lowered.compile().as_text()
    assert "HloModule" in text
    if mode.split:
        assert lowered.as_text() == str(mode.jit(step).program(model, X))
        assert all(f"// {name}" in text for name in lowered.compile().fragments)


def test_options_of_xla(mode, compiled_anew, no_folder):
    """They reach XLA, which refuses those that it does not know, and what they change is compiled anew."""
    model = mode.make(Pair)
    lowered = mode.jit(lambda model, x: model(x)).lower(model, X)
    expected = lowered.compile()(model, X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        lowered.compile(compiler_options={"no_such_option": 1})
    other = lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})
    np.testing.assert_allclose(other(model, X), expected, rtol=1e-6)
    if mode.jit is nnx.jit:
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        mode.jit(lambda model, x: model(x), compiler_options={"no_such_option": 1})(model, X)
    run = mode.jit(lambda model, x: model(x), compiler_options={"xla_embed_ir_in_executable": True})
    np.testing.assert_allclose(run(model, X), expected, rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        run.lower(model, X).compile({"no_such_option": 1})


class TestCompiledForOtherArguments:
    """Refused before anything runs, as by what JAX compiles."""

    @pytest.fixture
    def compiled(self, mode):
        self.mode, self.model = mode, mode.make(Pair)
        yield mode.jit(step, donate_argnums=0).lower(self.model, X).compile()
        assert int(self.model.count[...]) == 0  # nothing was donated or updated

    def test_shapes_and_dtypes(self, compiled):
        model = self.model
        for x in (np.ones((3, 4), np.float32), np.ones((2, 4), np.int32)):
            with pytest.raises(
                TypeError, match=r"[Aa]rgument.*float32\[2,4\].*(float32\[3,4\]|int32\[2,4\])"
            ):
                compiled(model, x)

    def test_no_array(self, compiled):
        with pytest.raises(TypeError, match="not a valid JAX type"):
            compiled(self.model, "x")

    def test_transformed(self, compiled):
        with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
            jax.grad(lambda x: compiled(self.model, x)[0])(X)

    @few(1)
    def test_other_devices(self, mode):
        placed = [jax.device_put(X, d) for d in jax.devices()[:2]]
        model = mode.make(Pair)
        compiled = mode.jit(step).lower(model, placed[0]).compile()
        with pytest.raises(ValueError, match=r"(?s)compiled for (the|input) sharding.*device=CpuDevice"):
            compiled(model, placed[1])
        assert int(model.count[...]) == 0
        loss, _ = compiled(model, X)  # lives nowhere in particular, and is brought there
        np.testing.assert_allclose(loss, step(Pair(), X)[0], rtol=1e-5)


def test_a_platform_is_that_of_the_devices(split):
    with pytest.raises(ValueError, match="lowering_platforms"):
        mm.jit(step).trace(split, X).lower(lowering_platforms=("tpu",))


def test_devices(mode):
    """A function of one device runs where it is told to, with its state; one of several cannot."""
    device = jax.devices()[3]
    if mode.jit is nnx.jit:  # which hands jax.jit what that refuses
        with pytest.raises(ValueError, match="out_shardings should not be specified"):
            nnx.jit(lambda x: x, device=device)
        return
    for options in ({"device": device}, {"backend": "cpu"}):
        run = mode.jit(lambda model, x: model(x), **options)
        model = mode.make(Pair)
        if mode.split:
            for call in (run, run.lower):
                with pytest.raises(
                    ValueError, match="device=.*on stage1, stage0: computation follows.*TaskMesh"
                ):
                    call(model, X)
        else:
            np.testing.assert_allclose(run(model, X), Pair()(X), rtol=1e-5)
            assert run(model, X).devices() == {options.get("device", jax.devices()[0])}
    run = mode.jit(lambda x: x + 1, device=device)
    for x in (X, jax.device_put(X, jax.devices()[2])):
        assert run(x).devices() == {device}


def test_a_device_and_another_word_on_where_to_run():
    mesh, tasks = pipeline(2)
    for other in ({"in_shardings": P()}, {"out_shardings": mm.TaskSharding({...: tasks[0]})}, {"mesh": mesh}):
        with pytest.raises(ValueError, match=f"device= next to {next(iter(other))}=.*SingleDeviceSharding"):
            mm.jit(lambda x: x, device=jax.devices()[1], **other)
    with pytest.raises(ValueError, match="both a device and a backend"):
        mm.jit(lambda x: x, device=jax.devices()[1], backend="cpu")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[3])  # what the messages recommend
    with mesh:
        model = born(Pair, mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]}))
        run = mm.jit(lambda model, x: model(x), in_shardings=here, out_shardings=here)
        assert run(model, X).devices() == {jax.devices()[3]}


@pytest.mark.parametrize("inline", [False, True])
def test_inlined_in_another_trace(mode, inline):
    def double(x):
        return x * 2

    inner = mode.jit(double, inline=inline)
    called = [str(jax.make_jaxpr(f)(X)) for f in (inner, nnx.jit(double, inline=inline))]
    assert called[0] == called[1] and (inline or "name=double" in called[0])
    y = mode.jit(lambda model, x: inner(model(inner(x))))(mode.make(Pair), X)
    np.testing.assert_allclose(y, 2 * Pair()(2 * X), rtol=1e-5)
