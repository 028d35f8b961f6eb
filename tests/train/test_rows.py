"""Documents side by side in a row: where they go, and that models compute each as if it were alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.modules import GemmaConfig, GPT2Config, LMConfig, MoELMConfig
from mmnnx.modules.build import build
from mmnnx.train.batches import in_batches, train_batches
from mmnnx.train.data import Text
from mmnnx.train.rows import Packed, Stream, best_fit, rows_of
from tests.slow import examples

LENGTH = 24
SIZES = dict(vocab=32, layers=4, width=16, heads=2, kv_heads=2, mlp=24)
CONFIGS = {
    "LM": LMConfig(**SIZES, window=5, qk_norm=True),
    "scanned LM": LMConfig(**SIZES, scan=2, remat=True, loss_chunks=2, attention_chunks=3),
    "Gemma": GemmaConfig(**SIZES, window=(4, None, 4, None), attention_softcap=3.0, local_rotary_base=1e3),
    "GPT-2": GPT2Config(**SIZES, positions=LENGTH),
}


def text_of(*lengths: int, records: bool = True) -> Text:
    rng = np.random.default_rng(sum(lengths))
    return Text.of([rng.integers(1, 32, n).astype(np.uint8) for n in lengths], 0, records)


def document(text: Text, number: int) -> list[int]:
    return text.tokens[text.ends[number - 1] if number else 0 : text.ends[number]].tolist()


def pieces(rows: Packed) -> list[list[int]]:
    """The tokens of each segment with the label of its last, row by row."""
    found = []
    for row in (rows[n] for n in range(len(rows))):
        for segment in range(1, row["segment_ids"].max() + 1):
            (here,) = np.nonzero(row["segment_ids"] == segment)
            assert row["positions"][here].tolist() == list(range(len(here))) == (here - here[0]).tolist()
            assert row["tokens"][here[1:]].tolist() == row["labels"][here[:-1]].tolist()
            found.append([*row["tokens"][here].tolist(), int(row["labels"][here[-1]])])
        assert (row["weights"] == (row["segment_ids"] > 0)).all()
    return found


def test_a_row_of_three_documents():
    row = Packed(Text(np.arange(1, 10, dtype=np.uint8), np.array([4, 6, 9]), 9), 7)[0]
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [1, 2, 3, 5, 7, 8, 0],
        "labels": [2, 3, 4, 6, 8, 9, 0],
        "weights": [1, 1, 1, 1, 1, 1, 0],
        "positions": [0, 1, 2, 0, 0, 1, 0],
        "segment_ids": [1, 1, 1, 2, 3, 3, 0],
    }
    assert {row[name].dtype for name in row if name != "weights"} == {np.dtype(np.int32)}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40))
@examples(100)
def test_each_token_but_the_first_of_its_document_is_a_label_once(lengths):
    text = text_of(*lengths)
    rows = Packed(text, LENGTH)
    cut = []
    for number in range(len(lengths)):
        tokens = document(text, number)
        starts = range(0, len(tokens) - 1, LENGTH)
        cut += [tokens[start : start + LENGTH + 1] for start in starts]
    assert sorted(pieces(rows)) == sorted(cut)
    labels = sum(max(0, n - 1) for n in lengths)
    assert rows.used * len(rows) * LENGTH == pytest.approx(labels)


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=200))
@examples(100)
def test_rows_are_not_overfull_and_few(sizes):
    row = best_fit(np.array(sizes), LENGTH)
    filled = np.bincount(row, sizes)
    assert filled.max() <= LENGTH and filled.min() > 0
    assert (filled <= LENGTH // 2).sum() <= 1  # two of these would be one


def test_many_short_documents_leave_little_padding():
    sizes = np.random.default_rng(0).lognormal(5, 0.8, 20_000).astype(int).clip(1, 512)
    assert sizes.sum() / 512 / (best_fit(sizes, 512).max() + 1) > 0.99


def test_records_are_packed_and_text_files_are_a_stream():
    for records, packing, kind in [
        (True, "auto", Packed),
        (False, "auto", Stream),
        (False, "documents", Packed),
        (True, "stream", Stream),
    ]:
        assert type(rows_of(text_of(9, 5, records=records), 4, packing)) is kind


def test_the_same_batches_after_a_restart():
    rows = Packed(text_of(*np.random.default_rng(0).integers(2, 60, 90)), LENGTH)
    batches = train_batches(rows, 8, seed=3)
    for _ in range(len(rows) // 8 + 2):  # into the second epoch
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(4)]
    again = train_batches(rows, 8, seed=3)
    again.set_state(state)
    for batch in expected:
        np.testing.assert_array_equal(batch["tokens"], next(again)["tokens"])
        assert batch["weights"].sum() == pytest.approx(1)
    others = next(train_batches(rows, 8, seed=4))
    assert (others["tokens"] != next(train_batches(rows, 8, seed=3))["tokens"]).any()


# What models make of them


@functools.cache
def model_of(kind: str):
    """A model all of whose weights matter; what draws new ones would have to be compiled."""
    model = nnx.eval_shape(lambda: build(CONFIGS[kind]))
    rng = np.random.default_rng(0)
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = 0.3 * rng.normal(size=weight.shape) + ("scale" in path)
        weight.set_value(jnp.asarray(values, jnp.float32))
    return model


def alone(text: Text) -> dict[str, np.ndarray]:
    """Each document in a row of its own, at its beginning: what comes after is not seen by what is before."""
    rows = [Packed(text_of_one(document(text, n)), LENGTH)[0] for n in range(len(text.ends))]
    return {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "weights")}


def text_of_one(tokens: list[int]) -> Text:
    return Text.of([np.array(tokens)], 0)


@nnx.jit
def logits(model, batch):
    places = {name: batch[name] for name in ("positions", "segment_ids") if name in batch}
    return model(batch["tokens"], **places)


def loss_fn(model, batch):
    return model.loss(**batch)


loss_and_gradients = nnx.jit(nnx.value_and_grad(loss_fn))


def assert_same(got, expected):
    """The loss and all gradients."""
    (loss, grads), (reference, others) = got, expected
    np.testing.assert_allclose(loss, reference, rtol=2e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(others))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5 * scale)
    jax.tree.map(close, grads, others)


three = st.lists(st.integers(2, 10), min_size=3, max_size=3).filter(lambda n: sum(n) - 3 <= LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@given(lengths=three)
@examples(20)
def test_three_documents_in_a_row_are_as_each_alone(kind, lengths):
    text = text_of(*lengths)
    (packed,) = in_batches(Packed(text, LENGTH), range(1), 1)
    rows, model = alone(text), model_of(kind)
    together, single = logits(model, packed)[0], logits(model, rows)
    for number in range(3):
        mine = together[packed["segment_ids"][0] == number + 1]
        np.testing.assert_allclose(mine, single[number, : len(mine)], rtol=1e-4, atol=1e-4)
    assert_same(loss_and_gradients(model, packed), loss_and_gradients(model, rows))


@pytest.mark.slow
@pytest.mark.parametrize("kind, size", [(k, n) for k in CONFIGS for n in (1, 2, 4)])
def test_however_a_batch_is_divided_its_loss_is_the_mean_over_its_labels(kind, size):
    """Over two stages of two devices, which share the rows of a microbatch if there are several."""
    text = text_of(20, 9, 7, 5, 3, 12, 24, 2)
    rows = Packed(text, LENGTH)
    (batch,) = in_batches(rows, range(len(rows)), 8)
    total = batch["weights"].sum()
    assert len({*batch["weights"].sum(axis=1)}) > 2  # rows do not count the same
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4])
    options = dict(dim=0, size=size, argnum=1, schedule="1f1b", reduce="sum")
    options |= dict(arg_shardings=jax.P("data") if size > 1 else None)
    grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), **options)
    with mesh:
        placement = mm.pipeline_sharding(nnx.eval_shape(lambda: build(CONFIGS[kind])), 2)
        model = mm.jit(nnx.clone, out_shardings=placement)(model_of(kind))
        got = mm.fetch(mm.jit(grad_fn)(model, batch | {"weights": batch["weights"] / total}))
    reference = alone(text)
    assert_same(
        got, loss_and_gradients(model_of(kind), reference | {"weights": reference["weights"] / total})
    )


@pytest.mark.slow
def test_losses_of_routers_are_shared_out_by_weight():
    model = build(MoELMConfig(**SIZES, experts=4, load_balancing=1.0))
    tokens = np.arange(2 * 9).reshape(2, 9) % 32
    weights = np.full((2, 8), 1 / 16, np.float32)
    whole = float(model.loss(tokens))
    assert model.loss(tokens[:, :-1], labels=tokens[:, 1:], weights=weights) == pytest.approx(whole, rel=1e-5)
    assert model.loss(tokens, weights=3 * weights) == pytest.approx(3 * whole, rel=1e-5)
