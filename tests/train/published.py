"""A tiny published model with a tokenizer and a chat template, and records to fine-tune it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mmnnx.modules import LMConfig, MoELMConfig, hf
from mmnnx.modules.build import build

TEXT = ["the cat sat on the mat", "a dog ran to the cat", "the mat was on the floor", "hé, a hat"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{% if m.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}\n"
    "<{{ m.role }}>{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


def publish(folder: Path, **sizes) -> Path:
    """Writes the model, with experts if `sizes` has some."""
    kind: Any = MoELMConfig if "experts" in sizes else LMConfig
    config = kind(**(dict(vocab=300, layers=4, width=16, heads=4, kv_heads=2, mlp=32, tied=True) | sizes))
    hf.save(build(config), folder)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path, begins: bool = False) -> Path:
    """Writes a tokenizer of at most 300 tokens, which may put one before a text, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = dict(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}
    fields = {"bos_token": "<s>", "eos_token": end, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def records(file: Path, count: int = 200) -> Path:
    """Writes records of both kinds."""
    lines = []
    for n in range(count):
        text = f"{TEXT[n % 3]} and {TEXT[(n + 1) % 3]} {n % 7} times"
        chat = {"messages": [{"role": "user", "content": TEXT[n % 3]}, {"role": "model", "content": text}]}
        lines.append(json.dumps({"text": text} if n % 2 else chat))
    file.write_text("\n".join(lines) + "\n")
    return file
