"""A published model is fine-tuned on records over stages, resumed, and exported."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mmnnx.cli import main
from mmnnx.modules import GPT2, GemmaConfig, GPT2Config, hf
from mmnnx.modules.build import build
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError
from mmnnx.train.loop import train
from mmnnx.train.metrics import Meter
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.step import create, place
from tests.slow import all_but
from tests.train.published import publish, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("published")
    publish(found / "model")
    records(found / "data.jsonl")
    return found


def config(folder, out, **options) -> TrainConfig:
    usual = dict(model=folder / "model", data=folder / "data.jsonl", out=out, steps=12, eval_every=6)
    usual |= dict(sequence=16, batch=8, microbatches=4, learning_rate=1e-2, warmup=2, sample=8, tensor=2)
    return TrainConfig(**(usual | options))


def killed(step: int) -> None:
    """As Ctrl-C at a step that no checkpoint has."""
    if step == 8:
        raise KeyboardInterrupt


def losses(out) -> list[float]:
    return [row["loss"] for row in RunFolder(out).rows() if "loss" in row]


def validations(out) -> list[float]:
    return [row["val_loss"] for row in RunFolder(out).rows() if "val_loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_it_learns_is_resumed_and_exported(folder, tmp_path, scan, capsys, monkeypatch):
    whole, halves = (config(folder, tmp_path / name, scan=scan) for name in ("whole", "halves"))
    train(whole)
    found = validations(whole.out)
    assert len(found) == 3 and found[-1] < found[0] - 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Meter, "step", lambda self, step, loss: killed(step))
        train(halves)
    train(dataclasses.replace(halves, resume=True))
    np.testing.assert_allclose(validations(halves.out), found, rtol=1e-5)
    np.testing.assert_allclose(losses(halves.out), losses(whole.out)[6:], rtol=1e-5)
    assert main(["export", str(whole.out), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("wrote the model of step 12 to ")
    assert json.loads((tmp_path / "new/config.json").read_text()) == json.loads(
        (folder / "model/config.json").read_text()
    )
    assert (tmp_path / "new/tokenizer.json").read_bytes() == (folder / "model/tokenizer.json").read_bytes()
    again = config(folder, tmp_path / "again", scan=scan, model=tmp_path / "new", steps=1)
    train(again)
    assert validations(again.out)[0] == pytest.approx(found[-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(microbatches=2, data_parallel=2, tensor=1),
        dict(microbatches=8, stages=4),
        dict(microbatches=1, stages=1, tensor=1),
    ],
)
def test_how_a_batch_of_packed_documents_is_divided_changes_no_loss(folder, tmp_path, options, capsys):
    usual = dict(steps=3, sequence=40, stages=2, sample=0)
    train(config(folder, tmp_path / "one", **usual))
    said = re.search(
        r"documents are packed in (\d+) rows of 40 tokens, which they fill to (.*)%", capsys.readouterr().out
    )
    assert int(said[1]) > 8 and 80 < float(said[2]) < 100
    train(config(folder, tmp_path / "other", **(usual | options)))
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(tmp_path / "one"), rtol=1e-5)
    np.testing.assert_allclose(validations(tmp_path / "other"), validations(tmp_path / "one"), rtol=1e-5)


EXPERTS = {
    "with tensor": dict(expert=2, tensor=2),
    "with data": dict(expert=2, data_parallel=2, fsdp=True, tensor=1),
}


@pytest.mark.parametrize("layout", all_but([], EXPERTS))
def test_experts_over_an_axis_of_their_own_change_no_loss(layout, folder, tmp_path):
    """Nor the losses of the routers in it."""
    model = publish(tmp_path / "moe", experts=4, top_k=2, tied=False)
    usual = dict(model=model, steps=3, sequence=40, stages=2, microbatches=2, sample=0)
    train(config(folder, tmp_path / "one", **usual, tensor=1))
    train(config(folder, tmp_path / "other", **usual, **EXPERTS[layout]))
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(tmp_path / "one"), rtol=2e-5)
    np.testing.assert_allclose(validations(tmp_path / "other"), validations(tmp_path / "one"), rtol=2e-5)


def test_experts_that_are_not_there_or_do_not_divide(folder, tmp_path):
    model = publish(tmp_path / "moe", experts=4, top_k=2, tied=False)
    usual = dict(model=model, stages=2, sequence=40, microbatches=2)
    with pytest.raises(UserError, match=f"--expert 3 does not divide the 4 experts of {model}"):
        train(config(folder, tmp_path / "no", **usual, expert=3, batch=12, tensor=1))
    with pytest.raises(UserError, match="--expert 2 does not divide a model without experts of "):
        train(config(folder, tmp_path / "no", **(usual | dict(model=folder / "model")), expert=2, tensor=1))


@pytest.mark.slow
def test_low_rank_additions_are_trained_resumed_and_merged(folder, tmp_path, monkeypatch):
    whole, halves = (
        config(folder, tmp_path / name, lora=2, stages=2, ema=0.5) for name in ("whole", "halves")
    )
    train(whole)
    found = validations(whole.out)
    assert found[-1] < found[0] - 0.05
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Meter, "step", lambda self, step, loss: killed(step))
        train(halves)
    train(dataclasses.replace(halves, resume=True))
    np.testing.assert_allclose(validations(halves.out), found, rtol=1e-5)
    assert main(["export", str(whole.out), str(tmp_path / "new")]) == 0
    before, after = (load_file(f / "model.safetensors") for f in (folder / "model", tmp_path / "new"))
    assert {name for name in before if (before[name] != after[name]).any()} == {
        name for name in before if name.endswith("proj.weight")
    }
    again = config(folder, tmp_path / "again", model=tmp_path / "new", steps=1)
    train(again)
    assert validations(again.out)[0] == pytest.approx(found[-1], rel=1e-4)


@pytest.mark.slow
def test_rows_are_in_nats_and_bits(folder, tmp_path):
    train(config(folder, tmp_path / "run", steps=1, stages=2))
    (first, *_) = (row for row in RunFolder(tmp_path / "run").rows() if "val_loss" in row)
    bits_per_token = first["val_loss"] / np.log(2)
    assert 0 < first["val_bits_per_byte"] < bits_per_token  # a token is several bytes
    assert "</s>" in (tmp_path / "run/sample.txt").read_text() or (tmp_path / "run/sample.txt").read_text()


@pytest.mark.slow
def test_exports_of_a_step_and_a_type(folder, tmp_path, capsys):
    train(config(folder, tmp_path / "run", steps=2, eval_every=1, stages=2))
    line = ["export", str(tmp_path / "run"), str(tmp_path / "new")]
    assert main([*line, "--step", "2", "--dtype", "bfloat16"]) == 0
    assert hf.read_config(tmp_path / "new").param_dtype == jnp.bfloat16
    assert main(line) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "other"), "--step", "7"]) == 2
    assert "7" in capsys.readouterr().err and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_model_of_bytes_is_exported(whole, tmp_path):
    assert main(["export", str(whole.path), str(tmp_path / "new")]) == 0
    assert hf.read_config(tmp_path / "new").vocab == 256
    fields = json.loads((tmp_path / "new/config.json").read_text())
    assert fields["max_position_embeddings"] == 16


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(stages=5), "--stages 5 is more than the 4 blocks of"),
        (dict(tensor=4), "--tensor 4 does not divide the kv_heads of .*, 2"),
        (dict(width=32), "--width is for a new model: --model has sizes of its own"),
        (dict(model="nowhere"), "there is no folder .*nowhere"),
    ],
)
def test_what_does_not_go_together(folder, tmp_path, options, said):
    if "model" in options:
        options = dict(model=folder / options["model"])
    with pytest.raises(UserError, match=said):
        train(config(folder, tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_a_model_is_loaded_with_the_attention_of_the_options(folder, tmp_path):
    options = config(folder, tmp_path / "run", stages=1, context=2, tensor=1)
    for attention, expected in (("auto", "ring"), ("xla", "xla")):
        given = dataclasses.replace(options, attention=attention)
        mesh, placement = place(given, np.array(jax.devices()[:2]))
        with mesh:
            model, _ = create(given, placement)
        assert model.config.attention == expected


def test_a_tokenizer_with_more_tokens_than_the_model(folder, tmp_path):
    publish(tmp_path / "model", vocab=280)
    with pytest.raises(UserError, match="has 280 tokens, and its tokenizer 29"):
        train(config(folder, tmp_path / "run", model=tmp_path / "model"))


def test_sequences_longer_than_learned_positions(folder, tmp_path):
    sizes = dict(vocab=256, layers=2, width=16, heads=2, kv_heads=2, mlp=64, positions=12)
    hf.save(GPT2(GPT2Config(**sizes), rngs=nnx.Rngs(0)), tmp_path / "model")
    with pytest.raises(UserError, match="--sequence 16 is more than the 12 positions of"):
        train(config(folder, tmp_path / "run", model=tmp_path / "model", stages=2))


def test_cudnn_is_for_gpus(folder, tmp_path):
    with pytest.raises(UserError, match="--attention cudnn is for GPUs, and the devices of this run are cpu"):
        train(config(folder, tmp_path / "run", attention="cudnn"))


def test_cudnn_computes_in_bfloat16(folder, tmp_path):
    gpu = type("Gpu", (), {"platform": "gpu"})()
    with pytest.raises(UserError, match="cudnn computes in bfloat16: add --precision bfloat16"):
        place(config(folder, tmp_path / "run", attention="cudnn"), np.array([gpu]))


def test_bounded_scores_have_no_cudnn(folder, tmp_path):
    sizes = dict(vocab=256, layers=2, width=16, heads=2, kv_heads=2, mlp=64, window=(4, None))
    model = build(GemmaConfig(**sizes, attention_softcap=3.0, logits_softcap=5.0))
    hf.save(model, tmp_path / "model")
    with pytest.raises(
        UserError, match="--attention cudnn knows no bounded scores, as those of .* auto or flash"
    ):
        options = dict(model=tmp_path / "model", stages=2, attention="cudnn")
        train(config(folder, tmp_path / "run", **options))
