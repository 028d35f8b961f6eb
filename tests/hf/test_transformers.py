"""What `transformers` publishes is computed as there, over stages, and what is written is read there."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.modules import hf, lora
from mmnnx.train.config import TrainConfig
from mmnnx.train.loop import train
from mmnnx.train.tokens import HubTokenizer
from tests.hf.conftest import transformers
from tests.train.published import publish, records

pytestmark = pytest.mark.hf

# The models of reference.py, which only runs where there is torch.
NAMES = [
    "llama2",
    "llama3",
    "llama-yarn",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe",
    "qwen3-moe-not-normalized",
    "gemma2",
    "gemma3",
    "gemma3-yarn",
    "gpt2",
    "gpt2-untied",
]
WITH_GRADIENTS = ["llama2", "llama3", "llama-yarn", "qwen3-moe", "gemma2", "gpt2"]
PROMPT, NEW = 9, 12

WAYS = ("one device", "stages")


def loaded(folder: pathlib.Path, way: str, **options):
    """The model in a folder: on one device, or over two stages of two devices with tensor parallelism."""
    if way == "one device":
        return hf.load(folder, **options)
    rules = mm.logical_rules("tensor")
    place = lambda model: mm.pipeline_sharding(model, 2, rules=rules)
    return hf.load(folder, placement=place, **options)


def mesh():
    return mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"))


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(3, 128, (2, 24)))


def computed(folder: pathlib.Path):
    return np.load(folder / "computed.npz")


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_text(published, name, way):
    expected = computed(published / name)
    with mesh():
        model = loaded(published / name, way)
        logits = mm.fetch(mm.jit(lambda model, tokens: model(tokens))(model, tokens()))
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
        text = mm.fetch(mm.generate(model, tokens()[:, :PROMPT], NEW))
        np.testing.assert_array_equal(text[:, -NEW:], expected["text"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_a_step(published, name, way, tmp_path):
    expected = computed(published / name)

    def loss_fn(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    with mesh():
        model = loaded(published / name, way)

        @mm.jit
        def gradients(model, tokens):
            grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, size=1, argnum=1, reduce="mean")
            return grad_fn(model, tokens)

        loss, grads = gradients(model, tokens())
        np.testing.assert_allclose(mm.fetch(loss), expected["loss"], rtol=1e-5)
        nnx.update(model, grads)
        hf.save(model, tmp_path / "grads")  # under the names that they have there
    got = tensors(tmp_path / "grads")
    wanted = {name.removeprefix("grad "): expected[name] for name in expected if name.startswith("grad ")}
    assert got.keys() == wanted.keys()
    for tensor, value in got.items():
        np.testing.assert_allclose(value, wanted[tensor], rtol=1e-3, atol=1e-5, err_msg=tensor)


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_every_model_is_compared(published):
    assert sorted(NAMES) == sorted(folder.name for folder in published.iterdir())


def test_what_was_loaded_is_written_as_it_was(published, tmp_path):
    for name in NAMES:
        source = published / name
        with mesh():
            hf.save(loaded(source, "stages", **scanned(name)), tmp_path / name)
        for file in [*source.glob("*.safetensors"), *source.glob("*.json")]:
            assert tensors_of(file) == tensors_of(tmp_path / name / file.name), file
        shutil.copy(source / "computed.npz", tmp_path / name)
    transformers(tmp_path, "--check")


def scanned(name: str) -> dict[str, bool]:
    """Where the blocks of a model are alike they may be stacked."""
    return {} if name.startswith("gemma") or name == "qwen2-window" else {"scan": True}


def tensors_of(file: pathlib.Path) -> object:
    if file.suffix == ".json":
        return file.read_text()
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in load_file(file).items()}


def test_configs_of_its_own_are_read_there(published, tmp_path):
    """Saved as models that were never loaded."""
    for name in NAMES:
        model = hf.load(published / name)
        model.source = None
        hf.save(model, tmp_path / name)
        assert hf.read_config(tmp_path / name) == model.config
        shutil.copy(published / name / "computed.npz", tmp_path / name)
    transformers(tmp_path, "--check")


def test_bfloat16(published, tmp_path):
    with mesh():
        model = loaded(published / "llama3", "stages", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        assert model.embed.embedding.get_value().dtype == jnp.bfloat16
        hf.save(model, tmp_path / "half", dtype=jnp.bfloat16)
        again = hf.load(tmp_path / "half")
    assert hf.read_config(tmp_path / "half").param_dtype == jnp.bfloat16
    for path, variable in nnx.to_flat_state(nnx.state(again)):
        assert variable.get_raw_value().dtype == jnp.bfloat16, path


def test_specs_of_its_own(published):
    """Rules over a stack, as any NNX model has."""
    stages = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
    rules = mm.TaskSharding(
        {
            mm.path("embed"): (stages[0], P(None, "model")),
            mm.path("blocks", ..., "query", "kernel"): (stages, P(None, None, "model")),
            mm.path("blocks"): stages,
            ...: stages[1],
        }
    )
    with mesh():
        model = hf.load(published / "llama2", placement=rules, scan=True)
        logits = mm.fetch(mm.jit(lambda model, tokens: model(tokens))(model, tokens()))
    np.testing.assert_allclose(logits, computed(published / "llama2")["logits"], rtol=0, atol=1e-4)


def test_a_model_that_was_fine_tuned(tmp_path):
    """Trained over 4 stages x 2 on records, exported, and read with its tokenizer."""
    publish(tmp_path / "model")
    data = records(tmp_path / "data.jsonl")
    options = dict(steps=4, sequence=16, batch=8, microbatches=4, warmup=1, sample=0, learning_rate=1e-2)
    run = TrainConfig(model=tmp_path / "model", data=data, out=tmp_path / "run", **options)
    losses = [row["val_loss"] for row in train(run).rows() if "val_loss" in row]
    assert losses[-1] < losses[0]
    assert main(["export", str(run.out), str(tmp_path / "new")]) == 0
    question = {"text": "the cat sat", "messages": [{"role": "user", "content": "hé"}] * 2}
    (tmp_path / "new/question.json").write_text(json.dumps(question))
    transformers(tmp_path / "new", "--answer")
    answer = json.loads((tmp_path / "new/answer.json").read_text())
    tokenizer = HubTokenizer(tmp_path / "new")
    tokens = tokenizer.encode(question["text"].encode())[:-1]
    assert tokens.tolist() == answer["tokens"]
    assert tokenizer.chat(question["messages"]) == answer["chat"]
    logits = hf.load(tmp_path / "new")(jnp.asarray(tokens)[None])
    np.testing.assert_allclose(logits[0], answer["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("scan", [False, True])
def test_low_rank_additions(published, tmp_path, scan):
    """Trained over stages; merged, and as an adapter of PEFT."""
    with mesh():
        model = lora(loaded(published / "llama2", "stages", scan=scan), 4, alpha=3.0)
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
            variable.set_value(variable.get_value() + 0.1)
        expected = mm.fetch(mm.jit(lambda model, tokens: model(tokens))(model, tokens()))
        hf.save(model, tmp_path / "merged")
        hf.save_adapter(model, tmp_path / "adapter")
    np.testing.assert_allclose(hf.load(tmp_path / "merged")(tokens()), expected, rtol=0, atol=1e-4)
    transformers(tmp_path / "adapter", "--adapted")
    adapted = np.load(tmp_path / "adapter/logits.npy")
    assert np.abs(adapted - computed(published / "llama2")["logits"]).max() > 0.1
    np.testing.assert_allclose(adapted, expected, rtol=0, atol=1e-4)
