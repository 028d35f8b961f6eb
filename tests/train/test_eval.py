"""``mmnnx eval``: the loss of a published model and of a run, on what is held out and on all."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.modules import hf
from mmnnx.train.config import TrainConfig
from mmnnx.train.data import load_corpus
from mmnnx.train.loop import train
from mmnnx.train.rows import rows_of
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.tokens import HubTokenizer
from tests.train.published import publish, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("published")
    publish(found / "model", layers=2)
    records(found / "data.jsonl")
    options = dict(steps=3, sequence=16, batch=8, microbatches=4, warmup=1, sample=0, stages=2)
    options |= dict(learning_rate=1e-2)
    train(TrainConfig(model=found / "model", data=found / "data.jsonl", out=found / "run", **options))
    return found


def found(capsys, *options: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["eval", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def loss_of(model, documents: list[np.ndarray], length: int) -> float:
    """The mean over labels, each piece of a document in a row of its own."""
    pieces = [d[start : start + length + 1] for d in documents for start in range(0, len(d) - 1, length)]
    rows = np.zeros((len(pieces), length + 1), np.int32)
    weights = np.zeros((len(pieces), length), np.float32)
    for n, piece in enumerate(pieces):
        rows[n, : len(piece)] = piece
        weights[n, : len(piece) - 1] = 1
    return float(model.loss(rows, weights=weights)) / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "everything, packing",
    [(a, p) for a in (False, True) for p in ("auto", "stream")],
)
def test_the_mean_over_tokens(folder, capsys, everything, packing):
    corpus = load_corpus(folder / "data.jsonl", HubTokenizer(folder / "model"))
    texts = [corpus.train, corpus.valid] if everything else [corpus.valid]
    if packing == "auto":
        documents = [part for text in texts for part in np.split(text.tokens, text.ends[:-1])]
    else:
        documents = [text.tokens[: 1 + (len(text) - 1) // 16 * 16] for text in texts]
    loss = loss_of(hf.load(folder / "model"), documents, 16)
    options = [str(folder / "model"), "--data", str(folder / "data.jsonl"), "--sequence", "16"]
    options += ["--stages", "2", "--tensor", "2", *(["--all"] if everything else [])]
    got = found(capsys, *options, "--packing", packing)
    size = sum(text.bytes for text in texts)
    assert got == pytest.approx(
        {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) * sum(map(len, texts)) / size,
            "tokens": sum(len(part) - 1 for part in documents),
        },
        rel=1e-5,
    )


@pytest.mark.slow
def test_a_run_and_what_is_printed(folder, capsys):
    options = ["--data", str(folder / "data.jsonl"), "--sequence", "16"]
    before, after = (found(capsys, str(folder / name), *options)["loss"] for name in ("model", "run"))
    assert after < before
    validated = [row["val_loss"] for row in RunFolder(folder / "run").rows() if "val_loss" in row]
    assert [before, after] == pytest.approx([validated[0], validated[-1]], rel=1e-5)
    assert main(["eval", str(folder / "run"), *options]) == 0
    assert f"loss {after:.4f} nats per token, perplexity" in capsys.readouterr().out


def test_mistakes_are_told(folder, tmp_path, capsys):
    both = [str(folder / "model"), "--data", str(folder / "data.jsonl")]
    for options, said in [
        ([str(tmp_path), "--data", str(folder / "data.jsonl")], "there is no config.json in"),
        ([str(folder / "model"), "--data", str(tmp_path / "none")], "there is no such file or folder"),
        (
            [*both, "--sequence", "9999", "--packing", "stream"],
            "tokens to evaluate, and a --sequence of 9999 needs 10000",
        ),
        ([*both, "--batch", "0"], "--batch must be above zero, not 0"),
        ([*both, "--stages", "0"], "--stages must be above zero, not 0"),
        ([*both, "--stages", "3", "--tensor", "1"], f"--stages 3 is more than the 2 blocks of {folder}"),
    ]:
        assert main(["eval", *options]) == 2
        assert said in capsys.readouterr().err


def test_other_batches_are_under_way_when_a_loss_is_waited_for(folder, capsys, monkeypatch):
    """So that devices do not wait for the host; and not all of them, as their inputs are on devices."""
    under_way, jit, fetch = [0], mm.jit, mm.fetch

    def counted(step):
        def call(*args):
            under_way.append(under_way[-1] + 1)
            return step(*args)

        return call

    def fetched(losses):
        under_way.append(under_way[-1] - len(jax.tree.leaves(losses)))
        return fetch(losses)

    monkeypatch.setattr(mm, "jit", lambda f: counted(jit(f)))
    monkeypatch.setattr(mm, "fetch", fetched)
    options = ["--data", str(folder / "data.jsonl"), "--sequence", "16", "--batch", "1", "--all"]
    found(capsys, str(folder / "model"), *options)
    assert len(under_way) > 30 and under_way[-1] == 0
    assert 4 < max(under_way) < 20


@pytest.mark.slow
def test_losses_of_routers_are_no_nats_of_a_token(tmp_path, capsys):
    """The loss of a model with experts is its cross-entropy alone, whatever the batch."""
    folder = publish(tmp_path / "experts", layers=2, experts=4, top_k=2, load_balancing=0.5)
    records(tmp_path / "data.jsonl")
    options = (str(folder), "--data", str(tmp_path / "data.jsonl"), "--sequence", "16")
    found_by = [found(capsys, *options, "--batch", str(rows))["loss"] for rows in (16, 2)]
    corpus = load_corpus(tmp_path / "data.jsonl", HubTokenizer(folder))
    model = hf.load(folder)
    forward = nnx.jit(type(model).__call__)
    rows = rows_of(corpus.valid, 16, "auto")
    total = labels = 0.0
    for row in (rows[n] for n in range(len(rows))):
        several = {name: row[name][None] for name in ("positions", "segment_ids")}
        logits = forward(model, row["tokens"][None], **several)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, row["labels"][None])
        total, labels = total + float((losses * row["weights"]).sum()), labels + row["weights"].sum()
    assert found_by == pytest.approx([total / labels] * 2, rel=1e-5)
