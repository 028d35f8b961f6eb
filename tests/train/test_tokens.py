"""Tokens of a published model's tokenizer, and of bytes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from mmnnx.train.config import TrainConfig
from mmnnx.train.documents import documents
from mmnnx.train.errors import UserError
from mmnnx.train.inputs import read_data
from mmnnx.train.tokens import Bytes, HubTokenizer, codec_of
from tests.train.published import TEXT, add_tokenizer, publish

CHAT = [{"role": "user", "content": "the cat"}, {"role": "model", "content": "sat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def tokenizer(folder):
    return HubTokenizer(folder)


def test_text_is_there_again_with_its_end(tokenizer):
    for text in TEXT:
        tokens = tokenizer.encode(text.encode())
        assert (
            tokens.dtype == np.uint16 and len(tokens) < len(text.encode()) and tokens.max() < tokenizer.vocab
        )
        assert tokenizer.decode(tokens) == text + "</s>"
    once = tokenizer.encode(b"a cat</s>")
    assert tokenizer.decode(once) == "a cat</s>"


def test_numbers_of_tokens_may_have_gaps(tmp_path):
    """Then there are fewer tokens than the largest number."""
    folder = publish(tmp_path / "model")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    mark = {"id": 70_000, "content": "<mark>", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(mark | {"normalized": False, "special": True})
    content["model"]["vocab"]["<mark>"] = 70_000
    file.write_text(json.dumps(content))
    tokens = HubTokenizer(folder).encode(b"a <mark>")
    assert tokens.dtype == np.uint32 and 70_000 in tokens
    assert HubTokenizer(folder).vocab == 70_001
    with pytest.raises(UserError, match="has 300 tokens, and its tokenizer 70001"):
        read_data(TrainConfig(model=folder))


def test_a_conversation(tokenizer):
    assert tokenizer.chat(CHAT) == "<s><user>the cat\n<model>sat\n"
    assert tokenizer.chat(CHAT[:1], answer=True) == "<s><user>the cat\n<model>"


def test_a_template_in_a_file_of_its_own(folder, tmp_path):
    other = publish(tmp_path / "model")
    (other / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert HubTokenizer(other).chat(CHAT) == "[the cat][sat]"
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}")
    assert HubTokenizer(other).chat(CHAT) == "user"


@pytest.mark.parametrize(
    "field",
    [
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<s>",
            }
        },
    ],
)
def test_a_text_is_not_cut_or_padded(tokenizer, tmp_path, field):
    """Whatever tokenizer.json asks for, as in transformers."""
    other = publish(tmp_path / "model")
    file = other / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | field))
    text = TEXT[0].encode()
    np.testing.assert_array_equal(HubTokenizer(other).encode(text), tokenizer.encode(text))


def rewritten(folder: Path, **fields) -> HubTokenizer:
    """The tokenizer with other fields in its tokenizer_config.json, or without those that are None."""
    file = folder / "tokenizer_config.json"
    kept = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))
    return HubTokenizer(folder)


def test_a_template_gets_what_transformers_gives_it(tmp_path):
    """No tools or documents, every token with a name, the time, and of named templates the default one."""
    template = (
        "{% if tools is not none or documents is not none %}tools{% endif %}{{ unk_token }}{{ pad_token }}"
        "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    )
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    other = rewritten(publish(tmp_path / "model"), unk_token="<unk>", chat_template=several)
    year = datetime.now().strftime("%Y")
    assert other.chat([{"role": "user", "content": "hi"}]) == f"<unk>{year}hi"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
@pytest.mark.parametrize("text, said", [("[]", "holds no JSON object, but a list"), ("{", "is damaged")])
def test_files_that_are_no_objects(tmp_path, file, text, said):
    folder = publish(tmp_path / "model")
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=f"{file} {said}"):
        HubTokenizer(folder)


def test_the_name_of_a_token_is_a_text(tmp_path):
    with pytest.raises(UserError, match=r"eos_token of the tokenizer is a text, not \['x'\]"):
        rewritten(publish(tmp_path / "model"), eos_token=["x"])


def test_where_the_token_is_named_that_ends_a_text(tmp_path):
    folder = publish(tmp_path / "model")
    end = HubTokenizer(folder).end
    assert rewritten(folder, eos_token=None).end is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert HubTokenizer(folder).end == 7
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert HubTokenizer(folder).end == 9
    assert HubTokenizer(folder).ends == (9, 5)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert HubTokenizer(folder).end == end
    assert HubTokenizer(folder).ends == (end, 9, 5)  # as of a chat: the end of a text, and of a turn


def test_a_text_begins_with_the_token_that_the_tokenizer_puts_before_it(tmp_path):
    """Once, as Llama 3 and Gemma want it; a conversation has what its template puts in."""
    folder = publish(tmp_path / "model")
    plain = HubTokenizer(folder).encode(b"the cat").tolist()
    assert 0 not in plain
    added = HubTokenizer(add_tokenizer(folder, begins=True))
    assert added.encode(b"the cat").tolist() == added.encode(b"<s>the cat").tolist() == [0, *plain]
    assert added.encode(b"the cat", chat=True).tolist() == plain
    assert rewritten(folder, add_bos_token=False).encode(b"the cat").tolist() == plain
    other = publish(tmp_path / "other")
    assert rewritten(other, add_bos_token=True).encode(b"the cat").tolist() == [0, *plain]


def test_of_records_only_texts_begin_so(tmp_path):
    tokenizer = HubTokenizer(add_tokenizer(publish(tmp_path / "model"), begins=True))
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"text": "hi"}, {"messages": messages, "text": None}, {"text": "the cat"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = documents(tmp_path / "data.jsonl", tokenizer)
    assert [tokenizer.encode(document.text, document.chat)[0] == 0 for document in found] == [True] * 3
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    found = documents(tmp_path / "data.jsonl", HubTokenizer(tmp_path / "model"))
    assert [tokenizer.encode(document.text, document.chat)[0] == 0 for document in found] == [
        True,
        False,
        True,
    ]


def test_what_a_template_refuses(tokenizer):
    with pytest.raises(UserError, match="the chat template of .* refuses messages: who?"):
        tokenizer.chat([{"role": "nobody", "content": ""}])


def test_a_template_cannot_run_programs(folder, tmp_path):
    other = publish(tmp_path / "model")
    (other / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="refuses messages: .*unsafe"):
        HubTokenizer(other).chat(CHAT)


def test_folders_without_what_it_needs(folder, tmp_path):
    other = publish(tmp_path / "model")
    (other / "tokenizer_config.json").unlink()
    without_end, with_end = (HubTokenizer(own).encode(b"the cat") for own in (other, folder))
    assert without_end.tolist() == with_end[:-1].tolist()
    with pytest.raises(UserError, match="has no chat template"):
        HubTokenizer(other).chat(CHAT)
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read"):
        codec_of(other)
    (other / "tokenizer.json").unlink()
    assert isinstance(codec_of(other), Bytes) and isinstance(codec_of(None), Bytes)


def test_bytes():
    tokens = Bytes().encode("hé".encode())
    assert tokens.tolist() == [104, 195, 169]
    assert Bytes().decode(tokens) == "hé" and Bytes().decode([104, 300]) == "h�"
    with pytest.raises(UserError, match="needs the chat template of a published model"):
        Bytes().chat(CHAT)
