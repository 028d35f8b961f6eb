"""Tiny published models by `transformers`, and what they compute. Run by a Python that has it, and torch.

python reference.py FOLDER            makes models, and beside each what it computes
python reference.py FOLDER --llama    makes one with 300 tokens in FOLDER itself
python reference.py FOLDER --check    compares what `transformers` computes with models written to FOLDER
python reference.py FOLDER --answer   writes what a model with a tokenizer makes of FOLDER/question.json
python reference.py FOLDER --adapted  writes what a model computes with the adapter in FOLDER, by PEFT
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
EXPERTS = dict(num_experts_per_tok=2, output_router_logits=False)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# Of the four pairs of features in a head, one is kept, one divided, and two are between.
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    beta_fast=4.0,
    original_max_position_embeddings=64,
)
GEMMA = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=5)
GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1_000_000.0),
    sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
)
GPT2 = dict(vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)

CONFIGS = {
    "llama2": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(YARN)),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, **EXPERTS),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-yarn": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=16, rope_parameters=YARN | dict(truncate=False, mscale=2.0, mscale_all_dim=0.5)
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True, **EXPERTS
    ),
    "qwen3-moe-not-normalized": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, moe_intermediate_size=24, norm_topk_prob=False, **EXPERTS
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 8}, **GEMMA, rope_parameters=GEMMA3_ROPE
    ),
    "gemma3-yarn": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 8},
        **GEMMA,
        rope_parameters=GEMMA3_ROPE | dict(full_attention=YARN | dict(attention_factor=1.5)),
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, initializer_range=0.2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, initializer_range=0.2, tie_word_embeddings=False),
}
SHARDED = {"llama2", "qwen3-moe"}  # in several files
WITH_GRADIENTS = {"llama2", "llama3", "llama-yarn", "qwen3-moe", "gemma2", "gpt2"}
PROMPT, NEW = 9, 12


def tokens() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(3, 128, (2, 24)))


def compute(model, gradients: bool) -> dict[str, np.ndarray]:
    """Logits of the tokens, what follows a prompt, and the gradients of the loss."""
    model.eval()
    model.set_attn_implementation("eager")
    out = {}
    with torch.no_grad():
        out["logits"] = model(tokens()).logits.numpy()
        out["text"] = model.generate(
            tokens()[:, :PROMPT], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[:, PROMPT:].numpy()
    if gradients:
        logits = model(tokens()[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
        loss.backward()
        out["loss"] = loss.detach().numpy()
        for name, p in model.named_parameters():
            out |= {f"grad {tensor}": grad for tensor, grad in as_stored(name, p.grad.numpy())}
    return out


def as_stored(name: str, x: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors that a parameter is stored in: experts are one parameter here, and apart in files."""
    if name.endswith("experts.gate_up_proj"):
        stem, (gate, up) = name.removesuffix("gate_up_proj"), np.split(x, 2, axis=1)
        return as_stored(f"{stem}gate_proj", gate) + as_stored(f"{stem}up_proj", up)
    stem, _, last = name.rpartition(".")
    if stem.endswith("experts"):
        return [(f"{stem}.{n}.{last}.weight", part) for n, part in enumerate(x)]
    return [(name, x)]


def answer(folder: pathlib.Path) -> None:
    """Tokens of a text, the text and tokens of a conversation and which are the assistant's, and logits."""
    question = json.loads((folder / "question.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = dict(
        tokens=tokenizer(question["text"])["input_ids"],
        chat=tokenizer.apply_chat_template(question["messages"], tokenize=False),
        **tokenizer.apply_chat_template(
            question["messages"], return_dict=True, return_assistant_tokens_mask=True
        ),
    )
    with torch.no_grad():
        found["logits"] = model(torch.tensor([found["tokens"]])).logits[0].tolist()
    (folder / "answer.json").write_text(json.dumps(found))


def llama(folder: pathlib.Path) -> None:
    """A Llama as `transformers` makes and writes it."""
    torch.manual_seed(0)
    sizes = SIZES | dict(vocab_size=300, bos_token_id=0, eos_token_id=1, initializer_range=0.02)
    config = transformers.LlamaConfig(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def adapted(folder: pathlib.Path) -> None:
    """Logits of the model that an adapter is for, with it."""
    import peft

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(model, str(folder))(tokens()).logits
    np.save(folder / "logits.npy", logits.numpy())


def main(folder: pathlib.Path, check: bool) -> None:
    for name, config in CONFIGS.items():
        own = folder / name
        if check:
            model = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
            got, expected = compute(model, False), np.load(own / "computed.npz")
            for key, x in got.items():
                np.testing.assert_allclose(x, expected[key], rtol=1e-4, atol=1e-4, err_msg=f"{name}: {key}")
            continue
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config())
        for parameter in model.parameters():  # norms and biases are ones and zeros at first
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(own, max_shard_size="40KB" if name in SHARDED else "5GB")
        np.savez(own / "computed.npz", **compute(model, name in WITH_GRADIENTS))


if __name__ == "__main__" and "--answer" in sys.argv:
    answer(pathlib.Path(sys.argv[1]))
elif __name__ == "__main__" and "--llama" in sys.argv:
    llama(pathlib.Path(sys.argv[1]))
elif __name__ == "__main__" and "--adapted" in sys.argv:
    adapted(pathlib.Path(sys.argv[1]))
elif __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), "--check" in sys.argv)
