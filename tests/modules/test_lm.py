"""The language model: it sees no future, its heads are what they claim, and its weights are named."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmnnx.modules import LM, GemmaConfig, GPT2Config, LMConfig, MoELMConfig
from mmnnx.modules.build import build as build_model
from mmnnx.modules.cross_entropy import mean_cross_entropy
from mmnnx.modules.lm import Block
from mmnnx.modules.mlp import MLP, SwiGLU
from mmnnx.modules.presets import PRESETS
from mmnnx.modules.rotary import RotaryScaling
from tests.mpmd.parity import assert_parity, pipeline, place
from tests.slow import all_but, few

SMALL = dict(vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp=24)


def new(seed: int = 0, **options) -> LM:
    return LM(LMConfig(**(SMALL | options)), rngs=nnx.Rngs(seed))


def build(seed: int = 0, **options) -> LM:
    """A model whose blocks do something: a new one's pass on what they get."""
    return nnx.clone(_built(seed, **options))


@functools.cache
def _built(seed: int, **options) -> LM:
    model = new(seed, **options)
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    for block in model.blocks:
        for layer in (block.attention.out, block.mlp.down):
            layer.kernel.set_value(0.3 * jax.random.normal(next(keys), layer.kernel.shape))
    return model


call = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


@nnx.jit
def loss_and_gradients(model, tokens):
    return nnx.value_and_grad(lambda model: model.loss(tokens))(model)


def tokens(shape=(2, 10), seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, 32)


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
def test_a_model_is_built_with_the_keys_of_rngs_and_no_entry_is_set(monkeypatch, transform):
    """Flax compares shardings for that: of a tracer JAX makes an error, which takes a walk through all."""
    config = LMConfig(**SMALL)
    expected = nnx.state(transform(lambda: LM(config, rngs=nnx.Rngs(3)))())
    monkeypatch.setattr(nnx.Variable, "__setitem__", None)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(transform(lambda: build_model(config, 3))()), expected
    )


@pytest.mark.slow
def test_logits_have_a_shape_and_are_float32_whatever_it_computes_in():
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = build(dtype=dtype)(tokens())
        assert (logits.shape, logits.dtype) == ((2, 10, 32), jnp.float32)


def test_weights_are_float32_whatever_it_computes_in():
    state = nnx.state(build(dtype=jnp.bfloat16), nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_new_blocks_pass_on_what_they_get():
    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    np.testing.assert_array_equal(new().blocks[0](x), x)
    assert jnp.abs(build().blocks[0](x) - x).max() > 0.1


def test_no_position_sees_a_later_one():
    model, a = build(), tokens()
    b = a.at[:, 6].add(1) % 32
    before, after = call(model, a), call(model, b)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (jnp.abs(before[:, 6:] - after[:, 6:]).max(axis=(0, 2)) > 1e-6).all()


def test_positions_matter():
    model = build()
    a = jnp.array([[1, 2, 3, 4]])
    b = jnp.array([[2, 1, 3, 4]])
    assert jnp.abs(call(model, a)[0, -1] - call(model, b)[0, -1]).max() > 1e-6


def test_a_key_value_head_serves_neighbouring_query_heads():
    """Grouped-query attention equals full attention whose key and value heads are repeated."""
    grouped, full = build(), build(kv_heads=4)
    state = nnx.to_pure_dict(nnx.state(grouped))
    for block in state["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"].reshape(16, 2, 4)
            block["attention"][name]["kernel"] = jnp.repeat(kernel, 2, axis=1).reshape(16, 16)
    nnx.update(full, state)
    np.testing.assert_allclose(call(full, tokens()), call(grouped, tokens()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", all_but([2], [1, 2]))
def test_labels_that_count_nothing(chunks):
    """Where the weight is 0 a label may be none of the tokens; elsewhere that shows."""
    x, weights = jnp.ones((1, 2, 3)), jnp.array([[0.0, 1.0]])
    loss = lambda x, *labels: mean_cross_entropy(lambda x: x, x, jnp.array([labels]), chunks, weights)
    values = [jax.value_and_grad(loss)(x, label, 1) for label in (-100, 0)]
    jax.tree.map(np.testing.assert_array_equal, *values)
    assert np.isnan(loss(x, 0, -100))


@pytest.mark.slow
def test_weights_of_the_loss_in_float64():
    with jax.enable_x64(True):
        x, labels, weights = jnp.ones((2, 4, 3)), jnp.ones((2, 4), int), jnp.full((2, 4), 0.125, jnp.float64)
        values = [mean_cross_entropy(lambda x: x, x, labels, chunks, weights) for chunks in (1, 2)]
    assert values[1].dtype == jnp.float64
    np.testing.assert_allclose(*values, rtol=1e-6)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(chunks=0), "4 is not divisible into 0 chunks"),
        (dict(chunks=-1), "4 is not divisible into -1 chunks"),
        (dict(labels=jnp.ones((1, 4), int)), r"labels are \[1, 4\], and what they are for \[2, 4\]"),
        (dict(weights=jnp.ones((2, 1))), r"weights are \[2, 1\], and what they are for \[2, 4\]"),
    ],
)
def test_losses_that_make_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        mean_cross_entropy(lambda x: x, jnp.ones((2, 4, 3)), **dict(labels=jnp.ones((2, 4), int)) | changes)


def test_loss_is_the_mean_cross_entropy_of_the_next_token():
    model, batch = build(), tokens()
    log_p = np.asarray(jax.nn.log_softmax(call(model, batch[:, :-1])))
    expected = -np.mean([log_p[i, j, batch[i, j + 1]] for i in range(2) for j in range(9)])
    np.testing.assert_allclose(loss_and_gradients(model, batch)[0], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_chunks_is_the_same(tied):
    """Its gradients too; and no array has the logits of the whole sequence."""
    whole, chunked = build(tied=tied), build(tied=tied, loss_chunks=3)
    batch = tokens()
    (a, grads), (b, others) = (loss_and_gradients(m, batch) for m in (whole, chunked))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), grads, others)
    shapes = [v.aval.shape for v in all_results(jax.make_jaxpr(lambda b: chunked.loss(b))(batch).jaxpr)]
    assert (2, 3, 32) in shapes and (2, 9, 32) not in shapes
    with pytest.raises(ValueError, match="a sequence of 9 is not divisible into 2 chunks"):
        build(loss_chunks=2).loss(batch)


def all_results(jaxpr):
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from all_results(inner)


@pytest.mark.parametrize("tied", all_but([True], [False, True]))
def test_first_loss_is_that_of_a_uniform_guess(tied):
    loss, _ = loss_and_gradients(new(tied=tied), tokens((8, 40)))
    np.testing.assert_allclose(loss, np.log(32), atol=0.15)


def test_tied_output_is_the_embedding():
    untied, tied = build(), build(tied=True)
    assert hasattr(untied, "head") and not hasattr(tied, "head")
    _, grads = loss_and_gradients(tied, tokens())
    assert (
        jnp.abs(grads["embed"]["embedding"][...]).sum(axis=1) > 0
    ).all()  # tokens never read are predicted


def test_every_weight_names_its_axes():
    names = {}
    for path, variable in nnx.to_flat_state(nnx.state(build(), nnx.Param)):
        axes = variable.get_metadata("out_sharding")
        assert len(axes) == variable.ndim, path
        names.setdefault(path[-2], set()).add(axes)
    assert names["out"] == {("heads", "embed")}
    assert names["gate"] == {("embed", "mlp")}
    assert names["embed"] == {("vocab", "embed")}
    assert names["head"] == {("embed", "vocab")}


@pytest.mark.slow
def test_names_of_axes_do_not_disturb_a_mesh_that_lacks_them():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    with jax.set_mesh(mesh):
        model = build()
    np.testing.assert_array_equal(model(tokens()), build()(tokens()))


@pytest.mark.slow
def test_works_under_jit():
    model = build()
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(model, tokens()), model(tokens()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(width=18), "width 18 is not divisible by 4 heads"),
        (dict(width=12), "leaves 3 features a head"),
        (dict(head_dim=5), "5 features a head; rotary positions need an even number"),
        (dict(layers=0), "layers=0: a model has at least one"),
        (dict(heads=4.0), "heads=4.0: it is a whole number"),
        (dict(head_dim=-2), "head_dim=-2: a model has at least one"),
        (dict(window=0), "window=0: a model has at least one"),
        (dict(layers=2, window=(None, 2.5)), "window=2.5: it is a whole number"),
        (dict(norm_eps=-1.0), "norm_eps=-1.0: it is a number above 0"),
        (dict(rotary_base=0), "rotary_base=0: it is a number above 0"),
        (dict(kv_heads=0), "kv_heads=0: a model has at least one"),
        (dict(mlp=-1), "mlp=-1: a model has at least one"),
        (dict(kv_heads=3), "4 heads are not divisible by 3 key-value heads"),
    ],
)
def test_sizes_that_do_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        LMConfig(**(SMALL | options))


def test_a_preset_has_the_published_number_of_parameters():
    published = {
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
        "llama3.2-1b": 1_235_814_400,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-8b": 8_190_735_360,
    }
    assert published.keys() == PRESETS.keys() - {"tiny"}
    for name, count in published.items():
        config = LMConfig.preset(name, scan=True)
        model = nnx.eval_shape(lambda config=config: LM(config, rngs=nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == count
        assert config.dtype == jnp.bfloat16


def test_a_preset_can_be_changed():
    config = LMConfig.preset("tiny", layers=1, param_dtype=jnp.bfloat16)
    assert (config.layers, config.width) == (1, 64)
    state = nnx.state(LM(config, rngs=nnx.Rngs(0)), nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    with pytest.raises(ValueError, match="no preset 'lama': there are 'llama3-8b', 'llama3-70b'"):
        LMConfig.preset("lama")


def stacked(model: LM, segments: int) -> LM:
    """The same model with its blocks stacked."""
    config = dataclasses.replace(model.config, scan=segments)
    out, state = LM(config, rngs=nnx.Rngs(0)), dict(nnx.to_flat_state(nnx.state(model)))
    first = 0
    for segment in out.blocks.segments:
        own = range(first, first + len(segment))
        for path, variable in nnx.to_flat_state(nnx.state(segment.layers)):
            variable.set_value(jnp.stack([state[("blocks", n, *path)][...] for n in own]))
        first += len(segment)
    for path, variable in nnx.to_flat_state(nnx.state(out)):
        if path[0] != "blocks":
            variable.set_value(state[path][...])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "segments, remat", [*itertools.product([1, 0, 2], [jax.checkpoint_policies.dots_saveable, True, False])]
)
def test_scanned_or_rematerialised_blocks_change_nothing(segments, remat):
    other = build(layers=3, remat=remat)
    other = stacked(other, segments) if segments else other
    loss, grads = loss_and_gradients(build(layers=3), tokens())
    got, found = loss_and_gradients(other, tokens())
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    kernels = [grads["blocks"][n]["attention"]["query"]["kernel"][...] for n in range(3)]
    if segments:
        parts = [found["blocks"]["segments"][n]["layers"] for n in range(segments)]
        mine = np.concatenate([part["attention"]["query"]["kernel"][...] for part in parts])
    else:
        mine = [found["blocks"][n]["attention"]["query"]["kernel"][...] for n in range(3)]
    np.testing.assert_allclose(mine, kernels, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["embed"]["embedding"][...], grads["embed"]["embedding"][...], atol=1e-6)


@few(1)
@pytest.mark.parametrize(
    "config",
    [
        LMConfig(attention="cudnn"),
        MoELMConfig(attention="cudnn"),
        GemmaConfig(attention="cudnn"),
        GPT2Config(attention="cudnn"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_an_implementation_of_attention_reaches_every_block(config):
    model = nnx.eval_shape(lambda: build_model(config))
    assert {block.attention.implementation for block in model.blocks} == {"cudnn"}
    with pytest.raises(ValueError, match="implementation='cudnn' knows no softcap: use None or \"xla\""):
        softcap = GemmaConfig(attention="cudnn", attention_softcap=50.0, layers=1)
        nnx.eval_shape(lambda: build_model(softcap)(jnp.zeros((1, 4), jnp.int32)))


@pytest.mark.parametrize("remat", [False, True])
def test_remat_reaches_every_block(remat):
    graphdef, state = nnx.split(build(remat=remat))
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, tokens())
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert sum("checkpoint" in name or "remat" in name for name in names) == (2 if remat else 0)


IN_PARTS = [{}, dict(scan=2, qk_norm=True, bias=True), dict(window=3, tied=True)]


@pytest.mark.slow
@pytest.mark.parametrize("options", IN_PARTS)
def test_with_a_cache_in_parts_as_all_at_once(options):
    model = build(scan=False, **{k: v for k, v in options.items() if k != "scan"})
    model = stacked(model, options["scan"]) if "scan" in options else model
    cache, parts = model.init_cache(2, 12), []
    for part in np.split(tokens(), [4, 5, 6], axis=1):
        logits, cache = call(model, part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), call(model, tokens()), rtol=1e-4, atol=1e-5)


def test_a_cache_is_in_the_type_it_computes_in():
    cache = build(dtype=jnp.bfloat16).init_cache(2, 12)
    assert cache[0].key.dtype == jnp.bfloat16
    assert cache[1].value.shape == (2, 12, 2, 4)


def test_segments_are_texts_of_their_own():
    model, a, b = build(), tokens((2, 4), 1), tokens((2, 6), 2)
    packed = jnp.concatenate([a, b], axis=1)
    places = jnp.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    ids = jnp.broadcast_to(jnp.repeat(jnp.array([0, 1]), jnp.array([4, 6])), (2, 10))
    logits = call(model, packed, positions=places, segment_ids=ids)
    np.testing.assert_allclose(logits[:, :4], call(model, a), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits[:, 4:], call(model, b), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_window_bounds_what_is_seen():
    model = build(layers=1, window=3)
    a = tokens((1, 10))
    b = a.at[:, 2].add(1) % 32
    changed = jnp.abs(model(a) - model(b)).max(axis=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 2 + [True] * 3 + [False] * 5


@few(1)
@pytest.mark.parametrize(
    "options",
    [
        dict(bias=True),
        dict(qk_norm=True),
        dict(norm_eps=0.5),
        dict(rotary_base=100.0),
        dict(rotary_scaling=RotaryScaling(original_max_position_embeddings=4)),
    ],
)
def test_options_reach_the_layers(options):
    """Each changes what the model computes of the same weights, or what weights it has."""
    model = build(**options)
    if "bias" in options:
        assert model.blocks[0].attention.query.bias.shape == (16,)
        assert model.blocks[0].attention.out.bias is None
    elif "qk_norm" in options:
        assert model.blocks[0].attention.query_norm.scale.shape == (4,)
    else:
        same = dict(nnx.to_flat_state(nnx.state(model))).items()
        plain = dict(nnx.to_flat_state(nnx.state(build())))
        assert all(np.array_equal(v[...], plain[path][...]) for path, v in same)
        assert jnp.abs(call(model, tokens()) - call(build(), tokens())).max() > 1e-4


@pytest.mark.parametrize("options", [dict(scan=3), dict(tied=True, remat=True)])
@pytest.mark.slow
def test_it_trains_over_three_stages_as_on_one_device(options):
    make = lambda: LM(LMConfig(**(SMALL | dict(layers=3) | options)), rngs=nnx.Rngs(0))
    mesh, tasks = pipeline(3, 2)
    under = ("blocks", "segments") if "scan" in options else ("blocks",)
    owned = [[(*under, n)] for n in range(3)]
    owned[0] += ["embed"]
    owned[2] += ["norm"] if "tied" in options else ["norm", "head"]
    rules = [(axis, "model") for axis in ("vocab", "heads", "kv_heads", "mlp")]
    tasks = [dataclasses.replace(task, logical_axes=rules) for task in tasks]
    batch = np.asarray(tokens((4, 9)))
    loss_fn = lambda model, batch: model.loss(batch)
    assert_parity(
        make, loss_fn, batch, place(tasks, *owned, spec=None), mesh=mesh, microbatch=2, steps=2, rtol=1e-4
    )


def test_a_subclass_makes_its_own_blocks():
    class Plain(Block):
        def make_mlp(self, config, rngs):
            return MLP(config.width, config.mlp, rngs=rngs)

    class Mixed(LM):
        def make_block(self, index, rngs):
            return Plain(self.config, rngs=rngs) if index == 1 else super().make_block(index, rngs)

    model = Mixed(LMConfig(**SMALL), rngs=nnx.Rngs(0))
    assert [type(block.mlp) for block in model.blocks] == [SwiGLU, MLP]
    assert model(tokens()).shape == (2, 10, 32)
    scanned = Mixed(LMConfig(**SMALL, scan=True), rngs=nnx.Rngs(0))
    assert type(scanned.blocks.segments[0].layers) is Block  # all are as number 0


@pytest.mark.slow
def test_a_subclass_changes_the_logits():
    class Capped(LM):
        def logits(self, x):
            return 5 * jnp.tanh(super().logits(x) / 5)

    capped = Capped(LMConfig(**SMALL), rngs=nnx.Rngs(0))
    nnx.update(capped, nnx.state(build()))
    np.testing.assert_allclose(capped(tokens()), 5 * np.tanh(build()(tokens()) / 5), rtol=1e-5, atol=1e-6)
    assert capped.loss(tokens()) != build().loss(tokens())


@pytest.mark.parametrize("method", ["loss", "cross_entropy"])
def test_rows_of_one_token_have_no_labels(method):
    lm = LM(LMConfig(layers=1, width=16, heads=2, mlp=16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rows of 1 tokens have no next one: give two or more, or labels="):
        getattr(lm, method)(jnp.zeros((2, 1), jnp.int32))
