"""Folders of published models: what is read, what is written, and what is said of one that does not fit."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import mmnnx as mm
from mmnnx.modules import (
    GemmaConfig,
    GPT2Config,
    LinearScaling,
    LMConfig,
    MoELMConfig,
    RotaryScaling,
    YarnScaling,
    hf,
)
from mmnnx.modules.build import build
from mmnnx.modules.hf import saving
from mmnnx.modules.hf.weights import Weights
from tests.slow import few

SIZES = dict(vocab=64, layers=4, width=16, heads=4, kv_heads=2, mlp=24, head_dim=8)
MOE = dict(experts=3, top_k=2, load_balancing=0.001, router_z=0.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "llama": LMConfig(**SIZES, rotary_scaling=RotaryScaling(), rotary_base=5e5),
    "tied llama": LMConfig(**SIZES, tied=True, rotary_scaling=LinearScaling(2.0)),
    "mistral": LMConfig(**SIZES, window=3),
    "mixtral": MoELMConfig(**SIZES, **MOE),
    "yarn": LMConfig(**SIZES, rotary_scaling=YarnScaling(4.0, 64, beta_fast=8.0, attention_factor=1.5)),
    "qwen2": LMConfig(**SIZES, bias=True, window=(None, None, 3, 3)),
    "qwen3": LMConfig(**SIZES, qk_norm=True),
    "qwen3_moe": MoELMConfig(**SIZES, **MOE, qk_norm=True, normalize=False),
    "gemma2": GemmaConfig(**SIZES, window=(3, None, 3, None), attention_softcap=3.0, logits_softcap=5.0),
    "gemma3": GemmaConfig(**SIZES, window=(3, 3, None, 3), qk_norm=True, local_rotary_base=1e3),
    "gpt2": GPT2Config(vocab=64, layers=4, width=16, heads=4, kv_heads=4, mlp=64, positions=32),
}


@functools.cache
def make(name: str):
    random = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype)
    return jax.tree.map(draw, nnx.state(build(CONFIGS[name])))


def model_of(name: str):
    """A model of a family; the same at each call."""
    model = build(CONFIGS[name])
    nnx.update(model, make(name))
    return model


@pytest.fixture
def folder(tmp_path):
    """A folder with a Llama."""
    hf.save(model_of("llama"), tmp_path / "llama")
    return tmp_path / "llama"


def stages(count: int = 2) -> mm.MultiMesh:
    return mm.MultiMesh(axis_sizes=(count, 2), axis_names=("stage", "model"))


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_equal_files(got: pathlib.Path, expected: pathlib.Path) -> None:
    assert sorted(f.name for f in got.iterdir()) == sorted(f.name for f in expected.iterdir())
    for file in expected.iterdir():
        assert (got / file.name).read_bytes() == file.read_bytes(), file.name


@few(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name, tmp_path):
    model = model_of(name)
    hf.save(model, tmp_path / "one")
    with stages():
        place = lambda model: mm.pipeline_sharding(model, 2, rules=mm.logical_rules("tensor"))
        again = hf.load(tmp_path / "one", placement=place)
        assert again.config == model.config
        for path, variable in nnx.to_flat_state(nnx.state(again)):
            own = make(name)
            for key in path:
                own = own[key]
            np.testing.assert_array_equal(mm.fetch(variable.get_raw_value()), own.get_raw_value())
        hf.save(again, tmp_path / "two")
    assert_equal_files(tmp_path / "two", tmp_path / "one")


def test_the_longest_sequence(folder, tmp_path):
    longest = lambda folder: json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    assert longest(folder) is None
    hf.save(hf.load(folder), tmp_path / "one", max_position_embeddings=32)
    assert longest(tmp_path / "one") == 32
    hf.save(hf.load(tmp_path / "one"), tmp_path / "two")
    assert longest(tmp_path / "two") == 32
    with pytest.raises(ValueError, match="max_position_embeddings=64: a GPT2 has a table of 32 positions"):
        hf.save(model_of("gpt2"), tmp_path / "gpt2", max_position_embeddings=64)
    assert not (tmp_path / "gpt2").exists()


def test_who_may_read_a_file(tmp_path):
    """As for any new file: safetensors would let nobody but the owner."""
    hf.save(model_of("llama"), tmp_path / "model")
    (tmp_path / "new").touch()
    assert {f.stat().st_mode for f in (tmp_path / "model").iterdir()} == {(tmp_path / "new").stat().st_mode}


@few(1)
@pytest.mark.parametrize("layers", [4, 5])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_stack_in_pieces(kind, layers, tmp_path, monkeypatch):
    """Equal pieces are one array of JAX, others a DividedArray; files hold some layers each."""
    monkeypatch.setattr(saving, "FILE_BYTES", 6000)
    config = dataclasses.replace(CONFIGS[kind], layers=layers)
    hf.save(build(config), tmp_path / "one")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    with stages():
        rules = mm.logical_rules("tensor")
        place = lambda model: mm.pipeline_sharding(model, 2, rules=rules)
        model = hf.load(tmp_path / "one", placement=place, scan=True)
        kernel = model.blocks.segments[0].layers.attention.query.kernel.get_raw_value()
        assert isinstance(kernel, mm.DividedArray) == (layers == 5)
        hf.save(model, tmp_path / "two")
    assert_equal_files(tmp_path / "two", tmp_path / "one")


def test_each_device_reads_its_own_part(folder, monkeypatch):
    read = []
    own = Weights.read
    monkeypatch.setattr(Weights, "read", lambda self, *args: read.append(own(self, *args)) or read[-1])
    with stages():
        rules = mm.logical_rules("tensor")
        model = hf.load(folder, placement=lambda model: mm.pipeline_sharding(model, 2, rules=rules))
    arrays = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(model))]
    shards = [s.data for x in arrays for s in x.addressable_shards if s.replica_id == 0]
    assert sorted(x.nbytes for x in read) == sorted(x.nbytes for x in shards)
    assert len(shards) > 1.5 * len(arrays)


def test_types(folder, tmp_path):
    model = hf.load(folder, dtype=jnp.bfloat16)
    assert (model.config.dtype, model.config.param_dtype) == (jnp.bfloat16, jnp.float32)
    hf.save(model, tmp_path / "half", dtype=jnp.bfloat16)
    half = hf.load(tmp_path / "half", param_dtype=jnp.float32)
    assert hf.read_config(tmp_path / "half").dtype == jnp.bfloat16
    assert half.head.kernel.get_raw_value().dtype == jnp.float32
    hf.save(half, tmp_path / "again")  # as it was stored
    assert_equal_files(tmp_path / "again", tmp_path / "half")


def test_a_tokenizer_goes_along(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"weights of another kind")
    hf.save(hf.load(folder), tmp_path / "new")
    assert sorted(f.name for f in (tmp_path / "new").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def rewrite(folder: pathlib.Path, change) -> None:
    """Changes the tensors of a folder."""
    found = tensors(folder)
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: pathlib.Path, **changes) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def test_names_without_a_prefix_and_buffers(tmp_path):
    """As the first checkpoints of GPT-2 are."""
    model = model_of("gpt2")
    hf.save(model, tmp_path / "gpt2")

    def change(found):
        for name in list(found):
            found[name.removeprefix("transformer.")] = found.pop(name)
        found["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)

    rewrite(tmp_path / "gpt2", change)
    again = hf.load(tmp_path / "gpt2")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    hf.save(again, tmp_path / "new")
    assert tensors(tmp_path / "new").keys() == tensors(tmp_path / "gpt2").keys() - {"h.0.attn.bias"}


def test_a_head_of_its_own_is_a_linear_layer_in_gpt2_too(tmp_path):
    config = dataclasses.replace(CONFIGS["gpt2"], tied=False, vocab=48)
    hf.save(build(config), tmp_path / "gpt2")
    found = tensors(tmp_path / "gpt2")
    assert found["lm_head.weight"].shape == (48, 16) and found["transformer.h.0.mlp.c_fc.weight"].shape == (
        16,
        64,
    )
    assert hf.load(tmp_path / "gpt2").head.kernel.get_value().shape == (16, 48)


def test_an_embedding_that_is_stored_twice(tmp_path):
    hf.save(model_of("tied llama"), tmp_path / "one")
    rewrite(tmp_path / "one", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    hf.save(hf.load(tmp_path / "one"), tmp_path / "two")
    assert tensors(tmp_path / "two").keys() == tensors(tmp_path / "one").keys()


def test_fields_as_they_once_were(folder, tmp_path):
    scaling = dict(type="linear", factor=4.0)
    reconfigure(
        folder, rope_parameters=..., rope_theta=2e4, rope_scaling=scaling, dtype=..., torch_dtype="bfloat16"
    )
    config = hf.read_config(folder)
    assert (config.rotary_base, config.rotary_scaling) == (2e4, LinearScaling(4.0))
    assert config.dtype == jnp.bfloat16
    scaling = dict(type="yarn", factor=None, mscale=1.0, original_max_position_embeddings=64)
    reconfigure(folder, rope_scaling=scaling, max_position_embeddings=512)
    assert hf.read_config(folder).rotary_scaling == YarnScaling(8.0, 64, mscale=1.0)
    reconfigure(folder, original_max_position_embeddings=128)
    assert hf.read_config(folder).rotary_scaling == YarnScaling(4.0, 128, mscale=1.0)
    hf.save(model_of("gemma2"), tmp_path / "gemma2")
    reconfigure(tmp_path / "gemma2", hidden_act="gelu_pytorch_tanh")  # beside hidden_activation
    assert hf.read_config(tmp_path / "gemma2") == CONFIGS["gemma2"]
    hf.save(model_of("gemma3"), tmp_path / "gemma")
    old = dict(
        rope_parameters=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        layer_types=...,
        sliding_window_pattern=2,
    )
    reconfigure(tmp_path / "gemma", **old)
    config = hf.read_config(tmp_path / "gemma")
    assert (config.rotary_base, config.local_rotary_base, config.window) == (1e6, 1e4, (3, None, 3, None))


@pytest.mark.parametrize(
    "name, absent, expected",
    [
        ("mistral", ["sliding_window"], dict(window=4096)),
        ("mixtral", ["rope_parameters"], dict(rotary_base=1e6, window=None)),
        ("gemma2", ["attn_logit_softcapping"], dict(attention_softcap=50.0, logits_softcap=5.0)),
        ("gemma2", ["final_logit_softcapping"], dict(attention_softcap=3.0, logits_softcap=30.0)),
        ("gemma2", ["sliding_window"], dict(window=(4096, None, 4096, None))),
        ("gemma3", ["rope_parameters"], dict(rotary_base=1e6, local_rotary_base=1e4)),
        ("gemma3", ["attn_logit_softcapping", "sliding_window"], dict(window=(4096, 4096, None, 4096))),
    ],
)
def test_fields_that_are_absent(name, absent, expected, tmp_path):
    """They have the values that `transformers` gives them; null is not absent."""
    hf.save(model_of(name), tmp_path / name)
    reconfigure(tmp_path / name, **dict.fromkeys(absent, ...))
    config = hf.read_config(tmp_path / name)
    assert {field: getattr(config, field) for field in expected} == expected
    reconfigure(tmp_path / name, **dict.fromkeys(["sliding_window", "attn_logit_softcapping"]))
    assert set(hf.read_config(tmp_path / name).windows) == {None}


def test_windows_of_experts(tmp_path):
    """All layers have it, from whichever on they would in other models of Qwen."""
    hf.save(model_of("qwen3_moe"), tmp_path / "moe")
    reconfigure(tmp_path / "moe", use_sliding_window=True, sliding_window=3, max_window_layers=2)
    assert hf.read_config(tmp_path / "moe").windows == (3,) * 4


def test_the_loss_that_balances_experts(tmp_path):
    """Published models take the mean over layers and count each expert of a token: where all experts are
    chosen alike it is the number of these. Ours is a sum over layers then."""
    hf.save(model_of("mixtral"), tmp_path / "moe")
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    published = config["router_aux_loss_coef"] * MOE["top_k"]
    assert MOE["load_balancing"] * SIZES["layers"] == pytest.approx(published)
    reconfigure(tmp_path / "moe", router_aux_loss_coef=0.02)
    assert hf.read_config(tmp_path / "moe").load_balancing * SIZES["layers"] == pytest.approx(0.02 * 2)


def test_no_dtype_in_the_config(tmp_path):
    """The dtype is that of the first weight in the files."""
    hf.save(model_of("llama"), tmp_path / "model", dtype=jnp.bfloat16)
    reconfigure(tmp_path / "model", dtype=...)
    assert hf.load(tmp_path / "model").embed.embedding.dtype == jnp.bfloat16


def test_a_local_base_of_all_blocks():
    """One window for all blocks is like a tuple of it."""
    local = dataclasses.replace(CONFIGS["gemma3"], window=3)
    assert local.of_block(0).rotary_base == 1e3
    assert dataclasses.replace(local, window=None).of_block(0).rotary_base == 1e4


def test_a_config_that_was_changed(folder, tmp_path):
    """What is loaded again is the same model; other fields of the source stay."""
    reconfigure(folder, rope_parameters=..., rope_scaling=dict(type="linear", factor=2.0), rope_theta=1e4)
    reconfigure(folder, extra="kept", eos_token_id=7)
    model = hf.load(folder, rotary_scaling=YarnScaling(4.0, 64), window=2, norm_eps=1e-2)
    hf.save(model, tmp_path / "changed")
    assert hf.load(tmp_path / "changed").config == model.config
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert (config["extra"], config["eos_token_id"], config["model_type"]) == ("kept", 7, "mistral")
    assert "rope_scaling" not in config
    hf.save(hf.load(folder), tmp_path / "same")
    same, source = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "same", folder))
    assert same == source


def test_tokens_that_end_a_text(folder):
    """A config knows of none: `transformers` would take those of Llama 2."""
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] is config["bos_token_id"] is None


@pytest.mark.slow
def test_each_variable_is_fetched_once(monkeypatch):
    """In several processes, where a fetch goes through the coordinator."""
    model = mm.modules.lora(build(dataclasses.replace(CONFIGS["qwen3_moe"], scan=True)), rank=2)
    pieces = saving.pieces_of(model)
    shapes = saving.tensor_shapes(pieces)
    expected = saving._tensors(model, pieces, list(shapes), dict.fromkeys(shapes, np.dtype("float32")))
    fetched = []
    monkeypatch.setattr(saving, "fetch", lambda x: fetched.append(id(x)) or np.asarray(x))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = saving._tensors(model, pieces, list(shapes), dict.fromkeys(shapes, np.dtype("float32")))
    assert len(fetched) == len(set(fetched)) == len(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@few(10)
@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(model_type="mamba"), "model_type 'mamba' is not known; there are 'llama'"),
        (dict(model_type=...), "has no field 'model_type'"),
        (dict(hidden_act="relu"), "hidden_act is 'relu', and mmnnx.modules have 'silu' alone"),
        (dict(attention_bias=True), "attention_bias is True"),
        (
            dict(rope_parameters=dict(rope_type="longrope")),
            "scaled by 'longrope', and mmnnx.modules have 'linear', 'llama3', 'yarn'",
        ),
        (dict(rope_parameters=dict(rope_type="linear")), "of the kind 'linear' have no factor"),
        (
            dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.1)),
            "llama_4_scaling_beta of rotary positions is 0.1, and mmnnx.modules do not know that of the kind",
        ),
        (dict(rope_parameters=YARN | dict(partial_rotary_factor=0.5)), "partial_rotary_factor of rotary"),
        (dict(rope_parameters=YARN | dict(beta_slow=64)), "beta_slow of YarnScaling.* above its beta_fast"),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2.0)), "has no field 'max_position_embeddings'"),
        (dict(num_key_value_heads=3), "4 heads are not divisible by 3 key-value heads"),
        (dict(vocab_size=65), "model.embed_tokens.weight is .64, 16. and not .65, 16."),
        (dict(num_hidden_layers=5), "it has no model.layers.4.self_attn.k_proj.weight, .* and 5 more"),
        (dict(num_hidden_layers=3), "it has model.layers.3.*, which the model has not"),
        (dict(tie_word_embeddings=True, num_hidden_layers=3), "which the model has not"),
        (dict(num_attention_heads=0), "num_attention_heads is 0, and not a whole number above 0"),
        (dict(hidden_size="16"), "hidden_size is '16', and not a whole number above 0"),
        (dict(head_dim=8.0), "head_dim is 8.0, and not a whole number above 0"),
        (dict(rms_norm_eps=-1), "rms_norm_eps is -1, and not a number above 0"),
        (dict(rope_parameters=dict(rope_theta=0)), "rope_theta is 0, and not a number above 0"),
        (dict(rope_parameters=[1]), r"rotary positions are \[1\], and not an object"),
        (dict(rope_parameters=dict(rope_type="linear", factor="2")), "factor of rotary .* is '2', and not a"),
        (dict(model_type=["llama"]), "model_type ..llama.. is not known"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings is 'false', and neither true nor false"),
        (dict(model_type="mistral", sliding_window="3"), "sliding_window is '3', and not a whole number"),
        (
            dict(model_type="mixtral", num_local_experts=2, num_experts_per_tok=2, router_aux_loss_coef=-1),
            "router_aux_loss_coef is -1",
        ),
        (
            dict(model_type="qwen2", use_sliding_window=True, max_window_layers="2"),
            "max_window_layers is '2'",
        ),
        (dict(model_type="gemma2", hidden_act=..., query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (
            dict(model_type="gemma2", hidden_act=..., final_logit_softcapping=0),
            "final_logit_softcapping is 0",
        ),
        (dict(dtype="x"), "dtype is 'x'; there are float64, float32, float16, bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(folder, changes, said):
    reconfigure(folder, **changes)
    with pytest.raises(ValueError, match=said):
        hf.load(folder, placement=lambda model: pytest.fail("nothing is placed before it is checked"))


@pytest.mark.parametrize("fields", [dict(norm_topk_prob=True), dict(model_type="mixtral")])
def test_one_normalized_expert_is_refused(fields, tmp_path):
    """Its weight would always be 1; ours is the router's probability."""
    hf.save(model_of("qwen3_moe"), tmp_path / "moe")
    reconfigure(tmp_path / "moe", **fields, num_experts_per_tok=1, num_local_experts=3)
    with pytest.raises(ValueError, match="num_experts_per_tok is 1, and the weight of the one expert"):
        hf.read_config(tmp_path / "moe")


@pytest.mark.parametrize(
    "text, said",
    [("{", "is damaged"), (b"\xff{}", "is damaged"), ("[1]", "holds no JSON object, but a list")],
)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_damaged(folder, file, text, said):
    (folder / file).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=f"{file} {said}"):
        hf.load(folder)


def test_an_index_of_other_things(folder):
    for found in ({"a": 1}, [1]):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
        with pytest.raises(ValueError, match="index.json: weight_map must name the file of each tensor"):
            hf.load(folder)


def test_files_that_are_not_as_they_should_be(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no config.json in"):
        hf.load(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        hf.load(folder)
    file.write_bytes(whole)
    rewrite(folder, lambda found: found.update({"lm_head.weight": found["lm_head.weight"].astype(np.int8)}))
    with pytest.raises(ValueError, match="lm_head.weight in .* is I8: weights are F64, F32, F16, BF16"):
        hf.load(folder)
    index = {"weight_map": dict.fromkeys(tensors(folder), "model-00001-of-00002.safetensors")}
    file.rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json"):
        hf.load(folder)
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors is missing"):
        hf.load(folder)
    save_file({"other": np.ones(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(
        ValueError, match="lm_head.weight is in model-00002-of-00002.*, which does not hold it"
    ):
        hf.load(folder)


def test_where_it_cannot_be_written(folder, tmp_path):
    model = hf.load(folder)
    with pytest.raises(FileExistsError, match="is not empty"):
        hf.save(model, folder)
    with pytest.raises(
        ValueError, match="not of the shape of the one in .*: it has no model.layers.0.self_attn.k_norm"
    ):
        hf.save(model_of("qwen3"), tmp_path / "new", like=folder)
    fewer = dataclasses.replace(model.config, layers=model.config.layers - 1)
    with pytest.raises(ValueError, match="the one in .*: it has model.layers.*, which the model has not"):
        hf.save(mm.modules.LM(fewer, rngs=nnx.Rngs(0)), tmp_path / "new", like=folder)
    with pytest.raises(ValueError, match="dtype=int32: weights are float64, float32, float16, bfloat16"):
        hf.save(model, tmp_path / "new", dtype=jnp.int32)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama"]


@pytest.mark.parametrize(
    "config",
    [
        LMConfig(**SIZES, bias=True, qk_norm=True),
        LMConfig(**SIZES, bias=True, window=(2, None, 3, 3)),
        LMConfig(**SIZES, window=(2, None, 2, 2)),
        MoELMConfig(**SIZES, **MOE, window=(2, None, 2, 2)),
        MoELMConfig(**SIZES, **MOE | dict(top_k=1)),
        GemmaConfig(**SIZES, window=(2, 3, 2, None)),
        GemmaConfig(**SIZES, attention_scale=0.3),
        GemmaConfig(**SIZES, attention_scale=2.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_what_is_not_published(config, tmp_path):
    with pytest.raises(ValueError, match="no published architecture has all of"):
        hf.save(build(config), tmp_path / "new")
    assert not [*tmp_path.iterdir()]


def test_whole_numbers_that_scale_attention(tmp_path):
    config = GemmaConfig(**SIZES, attention_scale=144**-0.5)
    hf.save(build(config), tmp_path / "gemma")
    assert hf.read_config(tmp_path / "gemma") == config


@pytest.mark.slow
def test_one_expert_that_is_not_normalized(tmp_path):
    model = build(MoELMConfig(**SIZES, **MOE | dict(top_k=1), qk_norm=True))
    hf.save(model, tmp_path / "moe")
    tokens = jnp.arange(8)[None]
    call = nnx.jit(lambda model, tokens: model(tokens)[0])
    np.testing.assert_array_equal(call(hf.load(tmp_path / "moe"), tokens), call(model, tokens))


def test_a_capacity_is_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="capacity_factor=0.5 is not saved"):
        hf.save(build(MoELMConfig(**SIZES, **MOE, capacity_factor=0.5)), tmp_path / "moe")


def test_nothing_is_left_of_what_did_not_go_on_the_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(OSError, match="cannot write model.safetensors: No space left"):
        hf.save(model_of("llama"), tmp_path / "new")
    assert not [*tmp_path.iterdir()]


def test_a_placement_that_leaves_weights_out(folder):
    with stages():
        rules = mm.TaskSharding({mm.path("embed"): mm.Task("stage0", mesh_slice={"stage": 0})})
        with pytest.raises(mm.PlacementError, match="blocks"):
            hf.load(folder, placement=rules)
