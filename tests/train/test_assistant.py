"""What the assistant writes in a conversation, and a loss on that alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmnnx.modules import hf
from mmnnx.train.assistant import conversation
from mmnnx.train.config import TrainConfig
from mmnnx.train.data import load_corpus
from mmnnx.train.errors import UserError
from mmnnx.train.loop import train
from mmnnx.train.rows import Packed, Stream
from mmnnx.train.tokens import Bytes, HubTokenizer
from tests.train.published import publish

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "hé, a hat"},
    {"role": "user", "content": "the mat"},
    {"role": "assistant", "content": "sat"},
]
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}</s>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def codec(model, tmp_path):
    """The tokenizer with another template."""

    def with_template(template: str) -> HubTokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return HubTokenizer(tmp_path)

    return with_template


def pieces(text: bytes, written: np.ndarray) -> list[str]:
    """What is written without a break."""
    starts = np.flatnonzero(np.diff(written, prepend=False, append=False)).reshape(-1, 2)
    return [text[first:last].decode() for first, last in starts]


@pytest.mark.parametrize("template", [TURNS, MARKED], ids=["turn by turn", "generation blocks"])
def test_answers_and_what_ends_them(codec, template):
    codec = codec(template)
    text, written = conversation(codec, CHAT)
    assert text.decode() == codec.chat(CHAT)
    assert pieces(text, written) == ["hé, a hat</s>", "sat</s>"]
    tokens, inside = codec.encode_parts(text, written)
    assert tokens.tolist() == codec.encode(text).tolist() and len(inside) == len(tokens)
    assert codec.decode(tokens[inside]) == "hé, a hat</s>sat</s>"
    assert not inside[-1], "the token that is added after the line break"
    ended = np.ones(len(b"sat<s>"), bool)
    assert [codec.encode_parts(text, ended[: len(text)])[1][-1] for text in (b"sat", b"sat<s>")] == [
        True,
        False,
    ]


def test_an_answer_that_nothing_ends(codec):
    codec = codec("{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}")
    text, written = conversation(codec, CHAT[1:3])
    assert pieces(text, written) == ["<assistant> hé, a hat "], "the template has no prompt for an answer"
    tokens, inside = codec.encode_parts(text, written)
    assert tokens[-1] == codec.end and inside[-1]


def test_a_token_that_begins_before_an_answer_counts(codec):
    codec = codec("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    tokens, inside = codec.encode_parts(b"a cat", np.array([False] * 3 + [True] * 2))
    assert codec.decode(tokens[inside]).endswith("cat</s>")
    assert codec.decode(tokens[~inside]) + codec.decode(tokens[inside]) == "a cat</s>"


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (THINKING, CHAT, "what the assistant writes in message 3 cannot be told: .* {% generation %}"),
        (TURNS, CHAT[:2], "no message is the assistant's, with the role 'assistant' or 'model'"),
        (
            "{% if messages|length < 3 %}{{ raise_exception('more') }}{% endif %}",
            CHAT,
            "the chat template refuses the messages up to number 3 alone: .*more.* {% generation %}",
        ),
        (
            "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}{{ x }}",
            CHAT,
            "blocks of the chat template cannot be found in its text",
        ),
    ],
)
def test_what_cannot_be_told(codec, template, messages, said):
    with pytest.raises(UserError, match=said):
        conversation(codec(template), messages)
    assert codec(THINKING).chat(CHAT[:3]).endswith("<think></think>hé, a hat\n")


@pytest.mark.parametrize(
    "template",
    [TURNS, "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"],
)
def test_a_text_may_have_the_marks_in_it(codec, template):
    plain, odd = (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": c}]
        for c in ("b", "b\ufdd00\ufdd1\ufdd20")
    )
    written = [pieces(*conversation(codec(template), messages)) for messages in (plain, odd)]
    assert [piece.replace("b", "b\ufdd00\ufdd1\ufdd20") for piece in written[0]] == written[1]


def test_json_in_a_template_is_not_for_html(codec):
    assert codec("{{ messages[0] | tojson }}").chat([{"role": "<é>"}]) == '{"role": "<é>"}'


def write(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_texts_count_in_full_and_rows_without_an_answer_are_left_out(model, tmp_path):
    codec = HubTokenizer(model)
    long = [{"role": "user", "content": "the cat " * 40}, {"role": "model", "content": "sat"}]
    data = write(tmp_path / "data.jsonl", {"text": "a hat"}, *[{"messages": long}] * 30)
    corpus, everything = load_corpus(data, codec, "assistant"), load_corpus(data, codec)
    assert corpus.checksum != everything.checksum
    assert np.array_equal(corpus.train.tokens, everything.train.tokens)
    texts = (corpus.train, corpus.valid)
    shown = [codec.decode(t.tokens[t.weights(0, len(t)) > 0]) for t in texts]
    assert sorted(set("".join(shown).replace("sat\n", "").split("</s>"))) == ["", "a hat"]
    assert sum(t.bytes for t in texts) == len("a hat") + 30 * len("sat\n")
    for kind in (Packed, Stream):
        rows, others = kind(corpus.train, 16), kind(everything.train, 16)
        assert 0 < len(rows) < len(others) / 2
        weights = np.stack([rows[n]["weights"] for n in range(len(rows))])
        assert (weights.sum(axis=1) > 0).all() and weights.mean() < 0.7


def test_without_conversations_it_is_refused(model, tmp_path):
    (tmp_path / "text.txt").write_text("all work " * 100)
    for data in (tmp_path / "text.txt", write(tmp_path / "data.jsonl", *[{"text": "a"}, {"text": "b"}])):
        with pytest.raises(UserError, match='--loss-on assistant is for records with "messages"'):
            load_corpus(data, HubTokenizer(model), "assistant")
    data = write(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 3)
    with pytest.raises(UserError, match="line 1: a conversation needs the chat template"):
        load_corpus(data, Bytes(), "assistant")


@pytest.mark.slow
def test_a_run_validates_on_the_same_tokens(model, tmp_path, capsys):
    chat = [dict(turn, role=turn["role"].replace("assistant", "model")) for turn in CHAT]  # as in its prompt
    data = write(tmp_path / "data.jsonl", *[{"messages": chat}] * 40)
    options = dict(steps=1, sequence=64, batch=4, microbatches=1, stages=1, tensor=1, sample=0, warmup=1)
    run = TrainConfig(model=model, data=data, out=tmp_path / "run", loss_on="assistant", **options)
    (first, *_) = (row for row in train(run).rows() if "val_loss" in row)
    said = capsys.readouterr().out
    assert "the loss is on the assistant's tokens alone" in said
    assert "step 0: validation loss of the assistant's tokens" in said
    codec, published = HubTokenizer(model), hf.load(model)
    text, written = conversation(codec, chat)
    tokens, inside = codec.encode_parts(text, written)
    weights = inside[None, 1:] / inside.sum()
    loss = float(published.loss(tokens[None, :-1], labels=tokens[None, 1:], weights=weights))
    assert first["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert first["val_bits_per_byte"] == pytest.approx(
        loss / np.log(2) * inside.sum() / written.sum(), rel=1e-5
    )
