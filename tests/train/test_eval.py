"""``mmnnx eval``: the loss of a published model and of a run, on what is held out and on all."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mmnnx.cli import main
from mmnnx.modules import hf
from mmnnx.train.config import TrainConfig
from mmnnx.train.data import Windows, load_corpus
from mmnnx.train.loop import train
from mmnnx.train.tokens import HubTokenizer
from tests.slow import all_but
from tests.train.published import publish, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("published")
    publish(found / "model")
    records(found / "data.jsonl")
    options = dict(steps=3, sequence=16, batch=8, microbatches=4, warmup=1, sample=0, stages=2)
    options |= dict(learning_rate=1e-2)
    train(TrainConfig(model=found / "model", data=found / "data.jsonl", out=found / "run", **options))
    return found


def found(capsys, *options: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["eval", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("everything", all_but([True], [False, True]))
def test_the_mean_over_sequences(folder, capsys, everything):
    corpus = load_corpus(folder / "data.jsonl", HubTokenizer(folder / "model"))
    tokens = np.concatenate([corpus.train, corpus.valid]) if everything else corpus.valid
    windows = Windows(tokens, 16)
    model = hf.load(folder / "model")
    loss = np.mean([model.loss(windows[n][None]) for n in range(len(windows))])
    size = corpus.valid_bytes + everything * corpus.train_bytes
    options = [str(folder / "model"), "--data", str(folder / "data.jsonl"), "--sequence", "16"]
    options += ["--stages", "2", "--tensor", "2", *(["--all"] if everything else [])]
    got = found(capsys, *options)
    assert got == pytest.approx(
        {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) * len(tokens) / size,
            "tokens": 16 * len(windows),
        },
        rel=1e-5,
    )


def test_a_run_and_what_is_printed(folder, capsys):
    options = ["--data", str(folder / "data.jsonl"), "--sequence", "16"]
    before, after = (found(capsys, str(folder / name), *options)["loss"] for name in ("model", "run"))
    assert after < before
    assert main(["eval", str(folder / "run"), *options]) == 0
    assert f"loss {after:.4f} nats per token, perplexity" in capsys.readouterr().out


def test_mistakes_are_told(folder, tmp_path, capsys):
    for options, said in [
        ([str(tmp_path), "--data", str(folder / "data.jsonl")], "there is no config.json in"),
        ([str(folder / "model"), "--data", str(tmp_path / "none")], "there is no such file or folder"),
        (
            [str(folder / "model"), "--data", str(folder / "data.jsonl"), "--sequence", "9999"],
            "tokens to evaluate, less than one sequence of 9999",
        ),
    ]:
        assert main(["eval", *options]) == 2
        assert said in capsys.readouterr().err
