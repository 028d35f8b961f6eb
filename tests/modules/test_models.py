"""The models: what they promise, and that they train split as they train whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules.encoder_decoder import DecoderBlock, EncoderBlock, EncoderDecoder, EncoderDecoderConfig
from mmnnx.modules.moe import MoE
from mmnnx.modules.moe_lm import MoEBlock, MoELM, MoELMConfig
from mmnnx.modules.two_tower import TextConfig, TextEncoder, TwoTower, TwoTowerConfig, contrastive_loss
from mmnnx.modules.vit import ImageEncoder, ViT, ViTBlock, ViTConfig
from mmnnx.sharding.pipeline import pipeline_sharding
from tests.mpmd.parity import assert_parity, assert_same, homes, pipeline
from tests.slow import few, grid

VOCAB = 16
BLOCK = dict(width=8, heads=2, mlp=12)
IMAGE = dict(image=8, patch=4, layers=2, classes=5, **BLOCK)
CONFIGS: dict[type, Callable[..., Any]] = {
    ViT: functools.partial(ViTConfig, **IMAGE),
    EncoderDecoder: functools.partial(
        EncoderDecoderConfig, vocab=VOCAB, encoder_layers=1, decoder_layers=2, **BLOCK
    ),
    MoELM: functools.partial(MoELMConfig, vocab=VOCAB, layers=2, kv_heads=1, experts=4, **BLOCK),
    TwoTower: functools.partial(
        TwoTowerConfig,
        ViTConfig(**IMAGE | {"layers": 1}),
        TextConfig(vocab=VOCAB, length=8, layers=1, **BLOCK),
        features=6,
    ),
}


def make(model: type, **options: Any) -> Any:
    """A model all of whose parameters matter: new blocks only pass on what they get.

    Its values are of NumPy: to compile what draws them takes longer than all else.
    """
    return filled(lambda: model(CONFIGS[model](**options), rngs=nnx.Rngs(0)))


def filled(make_model: Callable[[], Any]) -> Any:
    graphdef, state = nnx.split(nnx.eval_shape(make_model))
    rng = np.random.default_rng(1)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = 0.4 * rng.normal(size=leaf.shape) + ("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(values, leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state))


@functools.partial(nnx.jit, static_argnames="method")
def run(model: Any, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
    """A call of a model or of a method of it; not op by op, which takes long to compile."""
    return getattr(model, method)(*args, **kwargs)


def batch_of(model: type, rows: int = 8) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, 8, 8, 3)).astype(np.float32)
    texts = rng.integers(1, VOCAB, size=(rows, 7)).astype(np.int32)
    ragged = np.where(np.arange(7) < rng.integers(3, 8, size=(rows, 1)), texts, 0).astype(np.int32)
    return {
        ViT: (images, rng.integers(0, 5, size=rows).astype(np.int32)),
        EncoderDecoder: (ragged, np.roll(ragged, 1, axis=0)[:, :5]),
        MoELM: (texts,),
        TwoTower: (images, ragged),
    }[model]


def loss(model: Any, batch: tuple[np.ndarray, ...]) -> jax.Array:
    return model.loss(*batch)


def test_presets_with_experts_have_as_many_weights_as_they_say():
    """Mixtral's as published; that of 62 billion."""
    for name, count in {"mixtral-8x7b": 46_702_792_704, "moe-62b": 62_411_706_880}.items():
        config = MoELMConfig.preset(name, scan=True)
        model = nnx.eval_shape(lambda config=config: MoELM(config, rngs=nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_a_new_models_loss_falls(model):
    new = model(CONFIGS[model](), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(new, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    losses = [float(step(new, optimizer, batch_of(model))) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    guess = {ViT: np.log(5), EncoderDecoder: np.log(VOCAB), MoELM: np.log(VOCAB)}
    if model in guess:  # at first it guesses evenly; its routers' losses come on top
        assert guess[model] - 0.1 < losses[0] < guess[model] + 0.3


# Split and whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, stages, options, layers",
    [
        (ViT, 2, dict(layers=3), "blocks"),
        (EncoderDecoder, 3, dict(tied=True), ["encoder.blocks", "decoder.blocks"]),
        (MoELM, 2, dict(scan=2, capacity_factor=1.0), "blocks"),
    ],
)
def test_a_pipeline_trains_as_one_device_does(model, stages, options, layers):
    mesh, tasks = pipeline(stages)
    make_model = functools.partial(make, model, **options)
    program = assert_parity(
        make_model,
        loss,
        batch_of(model),
        pipeline_sharding(nnx.eval_shape(make_model) if layers == "blocks" else make_model(), tasks, layers),
        mesh=mesh,
        optimizer=optax.sgd(0.1),
        microbatch=4,
        steps=2,
        whole_batch=model is ViT,
    )
    assert len(program.table()) == stages


class Joined(TwoTower):
    """Its loss is in a task."""

    def __init__(self, config: TwoTowerConfig, task: mm.Task, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.task = task

    def loss(self, images, tokens):
        return mm.task(contrastive_loss, task=self.task)(*self(images, tokens))


@pytest.mark.slow
def test_towers_side_by_side_do_not_wait_for_each_other():
    mesh, (image, text, join) = pipeline(3)
    placement = mm.TaskSharding(
        {
            mm.path({"image", "image_head"}): image,
            mm.path({"text", "text_head"}): text,
            mm.path("log_scale"): join,
        }
    )
    program = assert_parity(
        lambda: filled(lambda: Joined(CONFIGS[TwoTower](), join, rngs=nnx.Rngs(0))),
        loss,
        batch_of(TwoTower, 20),
        placement,
        mesh=mesh,
        microbatch=4,
        steps=2,
        whole_batch=False,
    )
    crossings = {(t.source, t.target) for t in program.transfers if t.microbatch is not None}
    there = {("stage0", "stage2"), ("stage1", "stage2")}
    assert crossings == there | {(b, a) for a, b in there}
    assert program.simulate().makespan == 3 * (5 + 2 - 1)  # as a pipeline of two stages


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, rules",
    [
        (MoELM, {"expert": "model", "batch": "data", "heads": "model"}),
        (TwoTower, {"heads": "model", "mlp": "model", "batch": "data", "embed": "data"}),
    ],
)
def test_stages_over_several_devices_give_the_same(model, rules):
    mesh = mm.MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "data", "model"))
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}, logical_axes=rules) for i in range(2)]
    make_model = functools.partial(make, model)
    if model is TwoTower:
        text = mm.path({"text", "text_head", "log_scale"})
        placement = mm.TaskSharding({mm.path({"image", "image_head"}): tasks[0], text: tasks[1]})
    else:
        placement = pipeline_sharding(nnx.eval_shape(make_model), tasks)
    expected = nnx.jit(nnx.value_and_grad(loss))(make_model(), batch_of(model))
    with mesh:
        placed = mm.jit(make_model, out_shardings=placement)()
        got = mm.jit(nnx.value_and_grad(loss))(placed, batch_of(model))
    assert max(map(len, homes(placed).values())) == 4
    assert_same(got, expected, rtol=2e-5)


# Vision transformer


@pytest.mark.parametrize("pooling, dtype", grid(["class", "mean"], [jnp.float32, jnp.bfloat16], step=2))
def test_vit_gives_logits_in_float32(pooling, dtype):
    model = make(ViT, pooling=pooling, dtype=dtype)
    images, _ = batch_of(ViT)
    logits = run(model, images)
    assert (logits.shape, logits.dtype) == ((8, 5), jnp.float32)
    features = run(model, images, method="features")
    assert (features.shape, features.dtype) == ((8, 8), dtype)
    assert jnp.abs(logits - run(make(ViT, pooling=pooling), images)).mean() < 0.05


def patches(images: np.ndarray) -> np.ndarray:
    """[rows, patches, pixels of a patch] of images cut by hand."""
    rows = [images[:, i : i + 4, j : j + 4].reshape(len(images), -1) for i in (0, 4) for j in (0, 4)]
    return np.stack(rows, axis=1)


@few(1)
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_vit_is_a_product_of_patches_then_its_blocks(pooling):
    model = make(ViT, pooling=pooling)
    images, labels = batch_of(ViT)
    kernel = model.patches.kernel[...].reshape(-1, 8)
    x = jnp.einsum("bnp,pw->bnw", patches(images), kernel) + model.patches.bias[...]
    if pooling == "class":
        x = jnp.concatenate([jnp.tile(model.class_token[...], (8, 1, 1)), x], axis=1)
    x = x + model.positions[...]
    for block in model.blocks:
        x = run(block, x)
    x = model.norm(x)
    logits = model.head(x[:, 0] if pooling == "class" else x.mean(axis=1))
    np.testing.assert_allclose(run(model, images), logits, atol=1e-4)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(
        run(model, images, labels, method="loss"), -log_p[np.arange(8), labels].mean(), rtol=1e-4
    )


def test_a_vit_block_is_pre_norm_and_sees_both_ways():
    block, x = make(ViT).blocks[0], jax.random.normal(jax.random.key(0), (2, 5, 8))
    y = x + block.attention(block.attention_norm(x))
    np.testing.assert_allclose(run(block, x), y + block.mlp(block.mlp_norm(y)), atol=1e-5)
    assert jnp.abs(run(block, x.at[:, 4, 0].add(1.0)) - run(block, x))[:, 0].max() > 1e-4


def test_without_positions_the_order_of_patches_does_not_matter():
    model, (images, _) = make(ViT, pooling="mean"), batch_of(ViT)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], axis=1)
    assert jnp.abs(run(model, swapped) - run(model, images)).max() > 1e-3
    model.positions.set_value(jnp.zeros_like(model.positions[...]))
    np.testing.assert_allclose(run(model, swapped), run(model, images), atol=1e-4)


class HalfViT(ViT):
    def make_block(self, rngs):
        return nnx.Linear(self.config.width, self.config.width, rngs=rngs)


def test_blocks_of_a_vit_can_be_overridden():
    model = HalfViT(CONFIGS[ViT](), rngs=nnx.Rngs(0))
    assert all(isinstance(block, nnx.Linear) for block in model.blocks)
    assert run(model, batch_of(ViT)[0]).shape == (8, 5)


# Encoder and decoder


def test_decoder_sees_no_future_and_all_of_the_source():
    model, (source, target) = make(EncoderDecoder), batch_of(EncoderDecoder)
    before = run(model, source, target)
    assert (before.shape, before.dtype) == ((8, 5, VOCAB), jnp.float32)
    later = target.copy()
    later[:, 3] = later[:, 3] % (VOCAB - 1) + 1
    after = run(model, source, later)
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    assert (jnp.abs(after - before)[:, 3:].max(axis=(0, 2)) > 1e-5).all()
    other = source.copy()
    other[:, 2] = other[:, 2] % (VOCAB - 1) + 1  # the last token that all rows have, or one before it
    assert (jnp.abs(run(model, other, target) - before).max(axis=(0, 2)) > 1e-5).all()


def test_padding_of_a_source_does_not_matter():
    model, (source, target) = make(EncoderDecoder), batch_of(EncoderDecoder)
    longer = np.pad(source, ((0, 0), (0, 3)))
    np.testing.assert_allclose(run(model, longer, target), run(model, source, target), atol=1e-5)
    unpadded = np.where(longer == 0, 1, longer)
    assert jnp.abs(run(model, unpadded, target) - run(model, source, target)).max() > 1e-3


@pytest.mark.slow
def test_the_loss_is_of_each_target_token_from_those_before():
    model, (source, target) = make(EncoderDecoder, start=3), batch_of(EncoderDecoder)
    shifted = np.concatenate([np.full((8, 1), 3, np.int32), target[:, :-1]], axis=1)
    log_p = np.asarray(jax.nn.log_softmax(run(model, source, shifted)))
    told = [-log_p[i, t, target[i, t]] for i in range(8) for t in range(5) if target[i, t] != 0]
    assert 0 < len(told) < 40
    np.testing.assert_allclose(run(model, source, target, method="loss"), np.mean(told), rtol=1e-5)
    longer = np.pad(target, ((0, 0), (0, 2)))
    np.testing.assert_allclose(run(model, source, longer, method="loss"), np.mean(told), rtol=1e-5)
    assert run(model, source, np.zeros_like(target), method="loss") == 0


@pytest.mark.slow
def test_another_token_may_be_padding():
    model, (source, target) = make(EncoderDecoder, pad=9), batch_of(EncoderDecoder)
    source, target = (np.where(x == 9, 8, x) for x in (source, target))
    padded = np.pad(source, ((0, 0), (0, 2)), constant_values=9)
    np.testing.assert_allclose(run(model, padded, target), run(model, source, target), atol=1e-5)


def test_a_decoder_block_is_attention_then_cross_attention_then_a_layer():
    block = make(EncoderDecoder).decoder.blocks[0]
    x, memory = (jax.random.normal(jax.random.key(n), (2, 4 + n, 8)) for n in range(2))
    mask = jnp.arange(5)[None, None, None] < jnp.array([3, 5])[:, None, None, None]

    @nnx.jit
    def by_hand(block, x, memory, mask):
        y = x + block.attention(block.attention_norm(x))
        y = y + block.cross_attention(block.cross_norm(y), memory, mask=mask)
        return y + block.mlp(block.mlp_norm(y))

    np.testing.assert_allclose(run(block, x, memory, mask), by_hand(block, x, memory, mask), atol=1e-5)


@pytest.mark.slow
def test_tied_the_embedding_is_the_output_layer():
    model, (source, target) = make(EncoderDecoder, tied=True), batch_of(EncoderDecoder)
    assert not hasattr(model, "head")
    memory = run(model, source, method="encode")
    x = run(model.decoder, model.embed(target), memory, mask=model.seen(source))
    np.testing.assert_allclose(run(model, source, target), x @ model.embed.embedding[...].T, atol=1e-4)


class Numbered(EncoderDecoder):
    def make_encoder_block(self, index, rngs):
        block = EncoderBlock(self.config.block, rngs=rngs)
        block.number = index
        return block

    def make_decoder_block(self, index, rngs):
        block = DecoderBlock(self.config.block, rngs=rngs)
        block.number = 10 + index
        return block


def test_blocks_of_either_side_can_be_overridden():
    model = Numbered(CONFIGS[EncoderDecoder](), rngs=nnx.Rngs(0))
    assert [b.number for b in (*model.encoder.blocks, *model.decoder.blocks)] == [0, 10, 11]


def test_an_encoder_decoder_computes_in_bfloat16():
    source, target = batch_of(EncoderDecoder)
    model = make(EncoderDecoder, dtype=jnp.bfloat16)
    logits = run(model, source, target)
    assert (run(model, source, method="encode").dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert jnp.abs(logits - run(make(EncoderDecoder), source, target)).mean() < 0.05


# Mixture of experts


@pytest.mark.slow
def test_the_loss_adds_those_of_the_routers_of_all_blocks():
    (tokens,) = batch_of(MoELM)
    model = make(MoELM, load_balancing=0.5, router_z=0.25)

    @nnx.jit
    def by_hand(model, tokens):
        x, aux = model.embed(tokens), []
        for block in model.blocks:
            x = x + block.attention(block.attention_norm(x))
            y, own = block.mlp(block.mlp_norm(x))
            x = x + y
            aux.append(own)
        return jax.nn.log_softmax(model.logits(x)), aux

    log_p, aux = by_hand(model, tokens[:, :-1])
    told = -np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()
    balance, z = (sum(float(getattr(a, name)) for a in aux) for name in ("load_balancing", "router_z"))
    np.testing.assert_allclose(run(model, tokens, method="loss"), told + 0.5 * balance + 0.25 * z, rtol=1e-5)
    _, total = run(model, tokens, method="routed")
    np.testing.assert_allclose(total.fraction.sum(), 2, rtol=1e-5)  # of two blocks


def test_every_second_block_has_experts():
    model = make(MoELM, every=2)
    assert [isinstance(block.mlp, MoE) for block in model.blocks] == [False, True]
    _, total = run(model, *batch_of(MoELM), method="routed")
    np.testing.assert_allclose(total.fraction.sum(), 1, rtol=1e-5)


def test_experts_are_those_configured():
    model = make(MoELM, top_k=3, capacity_factor=1.5, param_dtype=jnp.bfloat16)
    layer = model.blocks[0].mlp
    assert (layer.experts, layer.top_k, layer.capacity_factor, layer.gate.dtype) == (4, 3, 1.5, jnp.bfloat16)
    new = MoELM(CONFIGS[MoELM](), rngs=nnx.Rngs(0))
    assert (new.blocks[0].mlp.down[...] == 0).all()


@pytest.mark.slow
def test_scanned_blocks_are_the_same_in_one_segment_or_two():
    (tokens,) = batch_of(MoELM)
    one, two = (MoELM(CONFIGS[MoELM](scan=n), rngs=nnx.Rngs(0)) for n in (1, 2))
    assert [len(s) for s in two.blocks.segments] == [1, 1]
    losses = [run(model, tokens, method="loss") for model in (one, two)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    np.testing.assert_allclose(run(one, tokens, method="routed")[1].fraction.sum(), 2, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, 2])
def test_a_cached_decode_is_the_full_forward(scan):
    model, (tokens,) = make(MoELM, scan=scan), batch_of(MoELM)
    cache, parts = model.init_cache(8, 7), []
    for start, end in ((0, 3), (3, 6), (6, 7)):
        logits, cache = run(model, tokens[:, start:end], cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), run(model, tokens), atol=1e-4)


class Dense(MoELM):
    def make_block(self, index, rngs):
        return MoEBlock(self.config, sparse=index == 0, rngs=rngs)


def test_blocks_with_experts_can_be_chosen():
    model = Dense(CONFIGS[MoELM](), rngs=nnx.Rngs(0))
    assert [isinstance(block.mlp, MoE) for block in model.blocks] == [True, False]


# Two towers


def test_features_have_length_one_and_the_scale_is_one_over_the_temperature():
    images, texts = batch_of(TwoTower)
    model = TwoTower(CONFIGS[TwoTower](temperature=0.5), rngs=nnx.Rngs(0))
    image, text, scale = run(model, images, texts)
    assert image.shape == text.shape == (8, 6)
    assert image.dtype == text.dtype == scale.dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(image, axis=-1), np.ones(8), rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(text, axis=-1), np.ones(8), rtol=1e-5)
    np.testing.assert_allclose(scale, 2.0, rtol=1e-6)
    model.log_scale.set_value(jnp.float32(9.0))
    np.testing.assert_allclose(run(model, images, texts)[2], 100.0, rtol=1e-5)


@pytest.mark.slow
def test_a_text_is_what_its_last_token_has_seen():
    tower = make(TwoTower).text
    _, texts = batch_of(TwoTower)
    np.testing.assert_allclose(run(tower, np.pad(texts, ((0, 0), (0, 1)))), run(tower, texts), atol=1e-5)
    short = np.array([[5, 7, 3, 0, 0]])
    np.testing.assert_allclose(run(tower, short), run(tower, short[:, :3]), atol=1e-5)
    assert jnp.abs(run(tower, np.array([[4, 7, 3, 0, 0]])) - run(tower, short)).max() > 1e-4
    assert run(tower, np.zeros((1, 3), np.int32)).shape == (1, 8)


def test_the_contrastive_loss_is_the_formula():
    image, text = np.random.default_rng(0).normal(size=(2, 5, 3))
    logits = 4.0 * image @ text.T
    rows = np.log(np.exp(logits).sum(axis=1)) - logits.diagonal()
    columns = np.log(np.exp(logits).sum(axis=0)) - logits.diagonal()
    got = contrastive_loss(jnp.asarray(image), jnp.asarray(text), jnp.float32(4.0))
    np.testing.assert_allclose(got, (rows.mean() + columns.mean()) / 2, rtol=1e-5)


@pytest.mark.slow
def test_the_loss_of_microbatches_is_of_their_own_contrast():
    """Half the batch is half the choice: at nought similarity, log 4 and not log 8."""
    model, (images, texts) = make(TwoTower), batch_of(TwoTower)
    model.log_scale.set_value(jnp.float32(-20.0))
    np.testing.assert_allclose(run(model, images, texts, method="loss"), np.log(8), rtol=1e-4)
    halves = mm.microbatch(loss, dim=0, size=4, argnum=1, reduce="mean")
    np.testing.assert_allclose(halves(model, (images, texts)), np.log(4), rtol=1e-4)


class OtherTowers(TwoTower):
    def make_image_encoder(self, rngs):
        return nnx.Sequential(lambda x: x.reshape(len(x), -1), nnx.Linear(192, 8, rngs=rngs))

    def make_text_encoder(self, rngs):
        return Short(self.config.text, rngs=rngs)


class Short(TextEncoder):
    def make_block(self, rngs):
        return nnx.Linear(8, 8, rngs=rngs)


def test_towers_can_be_overridden():
    model = OtherTowers(CONFIGS[TwoTower](), rngs=nnx.Rngs(0))
    assert isinstance(model.image, nnx.Sequential) and isinstance(model.text.blocks[0], nnx.Linear)
    assert jnp.isfinite(run(model, *batch_of(TwoTower), method="loss"))


def test_towers_compute_in_types_of_their_own():
    text = TextConfig(vocab=VOCAB, length=8, layers=1, dtype=jnp.bfloat16, **BLOCK)
    model = filled(lambda: TwoTower(TwoTowerConfig(ViTConfig(**IMAGE), text), rngs=nnx.Rngs(0)))
    images, texts = batch_of(TwoTower)
    assert (run(model.image, images).dtype, run(model.text, texts).dtype) == (jnp.float32, jnp.bfloat16)
    assert isinstance(model.image, ImageEncoder) and isinstance(model.image.blocks[0], ViTBlock)


# All of them


@few(1)
@pytest.mark.parametrize(
    "model, half",
    [
        (ViT, dict(param_dtype=jnp.bfloat16)),
        (EncoderDecoder, dict(param_dtype=jnp.bfloat16)),
        (MoELM, dict(param_dtype=jnp.bfloat16)),
        (TwoTower, dict()),
    ],
)
def test_weights_are_kept_in_float32_unless_told_otherwise(model, half):
    types = lambda model: {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}
    assert types(make(model)) == {jnp.dtype("float32")}
    if half:
        assert types(make(model, **half)) == {jnp.dtype("bfloat16")}


def test_images_may_have_other_channels():
    assert run(make(ViT, channels=1), np.ones((2, 8, 8, 1), np.float32)).shape == (2, 5)


# What cannot be


@pytest.mark.parametrize(
    "config, said",
    [
        (lambda: ViTConfig(image=30, patch=4), "patches of 4 pixels do not fill an image of 30"),
        (lambda: ViTConfig(width=30), "width 30 is not divisible by 4 heads"),
        (lambda: ViTConfig(pooling="max"), "pooling='max' is neither 'class' nor 'mean'"),
        (lambda: TextConfig(width=30), "width 30 is not divisible by 4 heads"),
        (lambda: TextConfig(pad=-1), "pad=-1 is no token of a vocabulary of 256"),
        (lambda: TwoTowerConfig(temperature=0.005), "temperature=0.005 is below 0.01"),
        (lambda: EncoderDecoderConfig(decoder_layers=0), "4 and 0 blocks: each side needs one or more"),
        (lambda: EncoderDecoderConfig(start=256), "start=256 is no token of a vocabulary of 256"),
        (lambda: EncoderDecoderConfig(width=30), "width 30 is not divisible by 4 heads"),
        (lambda: MoELMConfig(layers=4, every=5), "every=5 leaves no experts in 4 blocks: use 1 to 4"),
        (lambda: MoELMConfig(every=2, scan=True), "every=2 makes two: use every=1"),
        (lambda: MoELMConfig(kv_heads=3), "4 heads are not divisible by 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config, said):
    with pytest.raises(ValueError, match=said):
        config()


def test_inputs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"images are \[batch, 8, 8, 3\], not \[1, 8, 9, 3\]"):
        make(ViT)(jnp.ones((1, 8, 9, 3)))
    with pytest.raises(ValueError, match="a text of 9 tokens is longer than config.length, 8"):
        make(TwoTower).text(jnp.ones((1, 9), jnp.int32))


@pytest.mark.slow
def test_a_temperature_that_is_too_low_comes_back():
    """CLIP bounds the scale at 100; a step beyond it is taken back by the gradients of later ones."""
    model = make(TwoTower)
    batch = batch_of(TwoTower, 4)
    gradients = nnx.jit(nnx.grad(lambda model, batch: model.loss(*batch)))
    for log_scale in (4.0, 5.0):
        model.log_scale[...] = jnp.float32(log_scale)
        *_, scale = run(model, *batch)
        assert float(scale) == pytest.approx(min(np.exp(log_scale), 100), rel=1e-5)
        gradient = gradients(model, batch).log_scale[...]
        assert abs(float(gradient)) > 1e-6
