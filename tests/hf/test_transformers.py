"""What `transformers` publishes is computed as there, over stages, and what is written is read there."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

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
from mmnnx.train.assistant import conversation
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.tokens import HubTokenizer
from tests.environment import environment as environment_of_processes
from tests.hf.conftest import transformers
from tests.train.command import losses, run, started, validations, wait_until
from tests.train.kill import last_step
from tests.train.published import add_tokenizer, publish, records

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


def test_a_llama_is_fine_tuned_and_killed_and_goes_on(tmp_path):
    """Over 4 stages x 2 on records, killed between two checkpoints; then exported, and read with its
    tokenizer."""
    transformers(tmp_path / "model", "--llama")
    add_tokenizer(tmp_path / "model", begins=True)
    options = ["--model", tmp_path / "model", "--data", records(tmp_path / "data.jsonl")]
    options += ["--stages", "4", "--tensor", "2", "--microbatches", "4", "--batch", "8", "--sequence", "32"]
    options += ["--steps", "60", "--eval-every", "10", "--learning-rate", "1e-2", "--sample", "0"]
    environment = environment_of_processes() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, _, errors = run(environment, *options, "--out", whole)
    assert status == 0, errors
    with started(environment, *options, "--out", killed) as process:
        wait_until(lambda: last_step(killed) >= 24, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    kept = RunFolder(killed).saved
    assert kept in (10, 20, 30) and kept < last_step(killed) < 60
    status, _, errors = run(environment, "--resume", "--out", killed)
    assert status == 0, errors
    assert losses(killed) == losses(whole), "each record once, in the same order"
    found = validations(killed)
    assert found == validations(whole) and found[60] < found[0] / 2

    assert main(["export", str(killed), str(tmp_path / "new")]) == 0
    question = {"text": "the cat sat", "messages": [{"role": "user", "content": "hé"}] * 2}
    answer = answered(tmp_path / "new", question)
    tokenizer = HubTokenizer(tmp_path / "new")
    tokens = tokenizer.encode(question["text"].encode())[:-1]
    assert tokens.tolist() == answer["tokens"]
    assert tokenizer.chat(question["messages"]) == answer["chat"]
    logits = hf.load(tmp_path / "new")(jnp.asarray(tokens)[None])
    np.testing.assert_allclose(logits[0], answer["logits"], rtol=0, atol=1e-4)


def test_tokens_of_the_assistant(tmp_path):
    """As a template with `{% generation %}` blocks says."""
    publish(tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "</s>{% endgeneration %}{{ '\\n' }}{% else %}{{ m | tojson }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": "hé, <a> hat"} for role in ("user", "assistant") * 2]
    answer = answered(tmp_path / "model", {"text": "the cat", "messages": messages})
    codec = HubTokenizer(tmp_path / "model")
    text, written = conversation(codec, messages)
    assert text.decode() == answer["chat"]
    tokens, inside = codec.encode_parts(text, written)
    assert tokens[:-1].tolist() == answer["input_ids"]
    assert inside[:-1].astype(int).tolist() == answer["assistant_masks"]


def answered(folder: pathlib.Path, question: dict[str, Any]) -> dict[str, Any]:
    """What `transformers` makes of it, with the model and the tokenizer in the folder."""
    (folder / "question.json").write_text(json.dumps(question))
    transformers(folder, "--answer")
    return json.loads((folder / "answer.json").read_text())


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
