"""``mmnnx generate``: what a published model and a run write after prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from mmnnx.cli import main
from mmnnx.modules import generate, hf
from mmnnx.printable import printable
from mmnnx.train.config import TrainConfig
from mmnnx.train.generate_cli import Stream, encode, groups
from mmnnx.train.loop import train
from mmnnx.train.tokens import Bytes, Codec, HubTokenizer
from tests.train.published import publish, records


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published") / "model", layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, a run that has trained it, and the model that has learnt something."""
    found = tmp_path_factory.mktemp("learnt")
    publish(found / "model")
    records(found / "data.jsonl")
    options = dict(steps=30, sequence=16, batch=8, microbatches=4, learning_rate=2e-2, warmup=2, sample=0)
    train(TrainConfig(model=found / "model", data=found / "data.jsonl", out=found / "run", **options))
    assert main(["export", str(found / "run"), str(found / "new")]) == 0
    return found


def written(capsys, *options: str) -> str:
    assert main(["generate", *options]) == 0
    return capsys.readouterr().out


def expected(folder, prompt: str, count: int = 8) -> str:
    """What the exported model writes on one device."""
    model, tokenizer = hf.load(folder / "new"), HubTokenizer(folder / "new")
    made = generate(model, encode(tokenizer, prompt, False)[None], count)[0].tolist()
    return tokenizer.decode(made[: made.index(tokenizer.end)] if tokenizer.end in made else made)


@pytest.mark.slow
def test_a_run_and_its_export_write_the_same(folder, capsys):
    text = "the cat" + expected(folder, "the cat")
    assert len(text) > len("the cat")
    options = ["--prompt", "the cat", "--tokens", "8"]
    capsys.readouterr()
    assert written(capsys, str(folder / "new"), *options) == text + "\n"
    assert written(capsys, str(folder / "run"), *options, "--stages", "2", "--tensor", "2") == text + "\n"


@pytest.mark.slow
def test_several_prompts_side_by_side(folder, capsys):
    prompts = ["the cat", "a dog ran to the"]
    found = written(capsys, str(folder / "new"), "--prompt", *prompts, "--tokens", "8", "--stages", "2")
    assert found.split("\n\n")[:2] == [prompt + expected(folder, prompt) for prompt in prompts]


def test_prompts_in_flight_keep_all_stages_busy():
    found = {(rows, stages): groups(rows, stages) for rows in (1, 3, 6, 8) for stages in (1, 2, 4)}
    assert found == {
        (1, 1): 1, (1, 2): 1, (1, 4): 1, (3, 1): 1, (3, 2): 3, (3, 4): 3,
        (6, 1): 1, (6, 2): 2, (6, 4): 6, (8, 1): 1, (8, 2): 2, (8, 4): 4,
    }  # fmt: skip


@pytest.mark.slow
def test_a_conversation_and_a_draw(model, capsys):
    options = [str(model), "--prompt", "the mat", "--chat", "--tokens", "8", "--temperature", "1"]
    first, again, other = (written(capsys, *options, "--seed", seed) for seed in "334")
    assert first == again != other and "<user>" not in first


def test_mistakes_are_told(model, tmp_path, capsys):
    for options, said in [
        ([str(tmp_path), "--prompt", "a"], "there is no config.json in"),
        ([str(model), "--prompt", ""], "the text is empty"),
        ([str(model), "--prompt", "a", "--top-p", "2"], "--top-p is for drawing"),
        ([str(model), "--prompt", "a", "--tokens", "0"], "--tokens 0: generate at least one"),
        ([str(model), "--prompt", "a", "--temperature", "nan"], "temperature=nan"),
        ([str(model), "--prompt", "a", "b", "--in-flight", "4"], "in_flight=4 groups do not divide"),
        ([str(model), "--prompt", "a", "b", "--in-flight", "0"], "in_flight=0"),
    ]:
        assert main(["generate", *options]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert not shown.out


def test_a_character_shows_when_all_of_it_is_there(capsys):
    stream = Stream(Bytes(), "")
    for byte in "hé!".encode():
        stream(np.array([byte]))
    assert capsys.readouterr().out == "hé!"


def spaces_before_words(folder) -> HubTokenizer:
    """A tokenizer as those of sentencepiece: it drops the first space, and what it does not know is bytes."""
    pieces = ["▁", "▁the", "▁cat", "s", "at", ",", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return HubTokenizer(folder)


def test_what_is_shown_is_the_text_of_all_tokens_and_few_are_decoded_again(
    model, tmp_path, capsys, monkeypatch
):
    text = "thé  cat 🐈‍⬛ sät, € " * 20
    cut = [*text.encode(), *"🐈".encode()[:3]]  # in the middle of a character
    published, spaces = HubTokenizer(model), spaces_before_words(tmp_path / "spaces")
    draw = np.random.default_rng(0)
    words = [2, 1000, 2, 0, 0, 5, 1, *[6 + byte for byte in "é€".encode()], 3, 0, 4]  # 1000: is no token
    cases: list[tuple[Codec, Sequence[int] | np.ndarray]] = [
        (Bytes(), cut),
        (Bytes(), draw.integers(256, size=300)),
        (published, published.encode(text.encode())[:-1]),
        (published, draw.integers(2, published.vocab, size=300)),
        (spaces, words * 20),
        (spaces, draw.integers(6, size=300)),
    ]
    for codec, tokens in cases:
        whole, counts = codec.decode(tokens), []

        def decode(some, decode=codec.decode, counts=counts):
            counts.append(len(some))
            return decode(some)

        monkeypatch.setattr(codec, "decode", decode)
        stream = Stream(codec, "> ")
        for token in tokens:
            stream(np.array([token]))
        stream.end()
        assert capsys.readouterr().out == f"> {printable(whole, keep=chr(10) + chr(9))}\n"
        assert max(counts) < 40


def test_a_model_cannot_command_the_terminal(model, capsys, monkeypatch):
    stream = Stream(Bytes(), "a\tb\n")
    for byte in b"\x1b]0;owned\x07\nok":
        stream(np.array([byte]))
    assert capsys.readouterr().out == "a\tb\n\\x1b]0;owned\\x07\nok"
    monkeypatch.setattr(HubTokenizer, "decode", lambda *_: "\x1b[31m")
    found = written(capsys, str(model), "--prompt", "a", "the", "--tokens", "2")
    assert found == "a\\x1b[31m\n\nthe\\x1b[31m\n\n"
    found = written(capsys, str(model), "--prompt", "a", "the", "--tokens", "2", "--chat")
    assert found.startswith("a\n\\x1b")  # a question and its answer


@pytest.mark.slow
def test_tokens_are_shown_in_order(model):
    shown = []
    made = generate(
        hf.load(model), np.array([[3, 4], [5, 6]]), 5, on_token=lambda row: shown.append(row.tolist())
    )
    assert np.transpose(shown).tolist() == made.tolist()
