"""Which documents are read, which are held out, and in what order a stream of them comes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmnnx.train.batches import train_batches, valid_batches
from mmnnx.train.data import Corpus, Text, load_corpus
from mmnnx.train.errors import UserError
from mmnnx.train.rows import Stream
from mmnnx.train.tokens import Bytes


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def counting(size: int) -> Stream:
    """Sequences of 8 that can be told apart."""
    return Stream(Text.of([(np.arange(size) // 8 % 251).astype(np.uint8)], size), 8)


def test_standard_library_is_the_default():
    corpus = load_corpus()
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.2
    assert b"import" in corpus.train.tokens[:200_000].tobytes()


def test_standard_library_is_python_source_without_installed_packages(monkeypatch, tmp_path):
    write(tmp_path, **{"a.py": "one", "site-packages__b.py": "two", "c.txt": "three", "d__e.py": "four"})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    corpus = load_corpus()
    assert {corpus.train.tokens.tobytes(), corpus.valid.tokens.tobytes()} == {b"one", b"four"}


def test_every_file_is_on_one_side(text):
    corpus = load_corpus(text)
    files = {path.read_bytes() for path in text.iterdir()}
    assert corpus.documents == len(files)
    train, valid = corpus.train.tokens.tobytes(), corpus.valid.tokens.tobytes()
    assert all((file in train) != (file in valid) for file in files)
    assert len(train) + len(valid) == sum(map(len, files))


def test_adding_a_file_moves_none_to_the_other_side(tmp_path):
    write(tmp_path, **{f"f{i}": f"<{i}>" for i in range(60)})
    before = load_corpus(tmp_path)
    write(tmp_path, zz="<new>", a="<newer>")
    after = load_corpus(tmp_path)
    held_out = [f"<{i}>".encode() for i in range(60) if f"<{i}>".encode() in before.valid.tokens.tobytes()]
    assert 0 < len(held_out) < 60
    assert all(piece in after.valid.tokens.tobytes() for piece in held_out)


def test_one_file_is_held_out_by_its_tail(tmp_path):
    write(tmp_path, book="x" * 900 + "y" * 100)
    corpus = load_corpus(tmp_path / "book")
    assert corpus.train.tokens.tobytes() + corpus.valid.tokens.tobytes() == b"x" * 900 + b"y" * 100
    assert set(corpus.valid.tokens) == {ord("y")}
    same = load_corpus(tmp_path)  # a folder with that file alone
    assert np.array_equal(same.valid.tokens, corpus.valid.tokens)


def test_small_folder_still_holds_out_a_file(tmp_path):
    corpus = load_corpus(write(tmp_path, a="first", b="second"))
    assert {corpus.train.tokens.tobytes(), corpus.valid.tokens.tobytes()} == {b"first", b"second"}


def test_hidden_and_binary_files_are_passed_over(tmp_path):
    write(
        tmp_path,
        **{"a": "first", "b": "second", "c": b"\0\1", "d": b"\xff\xfe", ".e": "hidden", ".f__g": "hidden"},
    )
    corpus = load_corpus(tmp_path)
    assert corpus.documents == 2
    assert sorted(corpus.train.tokens.tobytes() + corpus.valid.tokens.tobytes()) == sorted(b"firstsecond")


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    write(tmp_path, a="first", b="second")
    os.mkfifo(tmp_path / "pipe")
    assert load_corpus(tmp_path).documents == 2


def test_checksum_tells_texts_apart(tmp_path):
    write(tmp_path, a="first", b="second")
    before = load_corpus(tmp_path).checksum
    assert load_corpus(tmp_path).checksum == before
    write(tmp_path, b="secon!")
    assert load_corpus(tmp_path).checksum != before


def test_checksum_tells_apart_where_documents_end():
    one, other = (Text(np.arange(6, dtype=np.uint8), np.array(ends), 6) for ends in ([2, 6], [3, 6]))
    assert Corpus(one, one, 2).checksum != Corpus(other, one, 2).checksum


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"ab\0cd", "not UTF-8 text"), (b"caf\xe9", "not UTF-8 text")],
)
def test_file_without_text(tmp_path, content, says):
    path = write(tmp_path, file=content) / "file"
    with pytest.raises(UserError, match=says) as error:
        load_corpus(path)
    assert str(path) in str(error.value)


def test_missing_path(tmp_path):
    with pytest.raises(UserError, match="no such file or folder") as error:
        load_corpus(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(error.value)


def test_folder_without_text(tmp_path):
    with pytest.raises(UserError, match="no UTF-8 text"):
        load_corpus(write(tmp_path, image=b"\0\1\2"))


def test_unreadable_file(tmp_path, monkeypatch):
    write(tmp_path, secret="text")

    def refuse(path):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the superuser, who runs tests too, may read any file
    with pytest.raises(UserError, match="secret: cannot be read .Permission denied."):
        load_corpus(tmp_path / "secret")


def test_a_stream_is_cut_into_sequences_that_predict_each_byte_but_the_first():
    rows = Stream(Text.of([np.arange(9, dtype=np.uint8), np.arange(9, 21, dtype=np.uint8)], 21), 5)
    assert len(rows) == 4
    for n in range(4):
        assert rows[n]["tokens"].tolist() == [*range(5 * n, 5 * n + 5)]
        assert rows[n]["labels"].tolist() == [*range(5 * n + 1, 5 * n + 6)]
        assert rows[n]["weights"].tolist() == [1] * 5
    assert rows[0]["tokens"].dtype == rows[0]["labels"].dtype == np.int32


def test_batches_cover_the_text_once_an_epoch_in_a_new_order_each_time():
    batches = train_batches(counting(8 * 12 + 1), 4, seed=0)
    epochs = [np.concatenate([next(batches)["tokens"] for _ in range(3)])[:, 0].tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_seed_decides_the_order():
    def first(seed):
        return next(train_batches(counting(2000), 4, seed))["tokens"].tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_batches_go_on_from_a_state_that_went_through_json():
    rows = counting(8 * 20 + 1)
    batches = train_batches(rows, 4, seed=3)
    for _ in range(7):  # into the second epoch
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches)["tokens"].tolist() for _ in range(6)]
    again = train_batches(rows, 4, seed=3)
    again.set_state(state)
    assert [next(again)["tokens"].tolist() for _ in range(6)] == expected


def test_few_batches_are_made_ahead(monkeypatch):
    """A batch may be large, and the host makes many in the time of a step."""
    read = []
    row = Stream.__getitem__
    monkeypatch.setattr(Stream, "__getitem__", lambda rows, n: read.append(n) or row(rows, n))
    batches = train_batches(counting(8 * 20 + 1), 4, seed=0)
    next(batches)
    time.sleep(0.3)  # in which hundreds would be made
    assert 4 <= len(read) <= 4 * 5


def test_validation_batches_are_spread_over_the_text():
    batches = valid_batches(counting(8 * 100 + 1), batch=2, count=3)
    assert [batch["labels"].shape for batch in batches] == [(2, 8)] * 3
    assert batches[0]["tokens"][0, 0] == 0
    assert batches[-1]["tokens"][-1, 0] == 99


def test_little_text_is_validated_with_once():
    one, other = valid_batches(counting(8 * 3 + 1), batch=2)
    assert [*one["tokens"][:, 0], other["tokens"][0, 0]] == [0, 1, 2]
    assert other["weights"].tolist() == [[1] * 8, [0] * 8]


def test_too_little_text():
    with pytest.raises(UserError, match="3 sequences of 8 to train on, less than one batch of 4; give"):
        train_batches(counting(30), 4, seed=0)
    with pytest.raises(UserError, match="less than one sequence of 8 held out for validation"):
        valid_batches(counting(8), 4)


RECORDS = '{"text": "one"}\n\n{"text": "two", "other": 1}\n{"text": "one"}\n'


def test_records_are_documents(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(RECORDS)
    corpus = load_corpus(file)
    assert corpus.documents == 3 and corpus.valid.bytes == len(corpus.valid)
    both = sorted([bytes(corpus.train.tokens), bytes(corpus.valid.tokens)], key=len)
    assert both in ([b"two", b"oneone"], [b"one", b"onetwo"], [b"one", b"twoone"])
    (tmp_path / "notes.txt").write_text("and text")
    (tmp_path / "image").write_bytes(b"\0\1\2")
    assert load_corpus(tmp_path).documents == 4


def test_other_records_do_not_move_what_is_held_out(tmp_path):
    file = tmp_path / "some.jsonl"
    lines = [json.dumps({"text": f"record number {n};"}) for n in range(300)]
    file.write_text("\n".join(lines[100:]))
    before = bytes(load_corpus(file).valid.tokens).split(b";")
    file.write_text("\n".join(lines))
    after = bytes(load_corpus(file).valid.tokens).split(b";")
    assert 3 < len(before) < 20 and set(before) < set(after)


@pytest.mark.parametrize(
    "line, said",
    [
        ("{text", "line 3: this is no JSON"),
        ("[" * 200_000, "line 3: this is no JSON"),
        ("[1]", 'line 3: a record is a JSON object with "text" or "messages", not .1.'),
        ('{"question": 1, "answer": 2}', 'neither "text" nor "messages", but question, answer'),
        ('{"messages": []}', "line 3: a conversation needs the chat template"),
        ('{"text": 5}', 'line 3: "text" is a string, not 5'),
        ('{"messages": ["Hi"]}', 'line 3: "messages" is a list of objects such as .*, not ..Hi..'),
        ('{"text": "\\ud800"}', "line 3: this is no text .*surrogates not allowed"),
    ],
)
def test_lines_that_are_no_records(tmp_path, line, said):
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"text": "one"}}\n{{"text": "two"}}\n{line}\n')
    with pytest.raises(UserError, match=said):
        load_corpus(file)


def test_one_record_cannot_be_held_out_and_trained_on(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="there is one record; one more is needed"):
        load_corpus(file)


def test_a_text_is_not_cut_within_a_character(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("é" * 41)
    corpus = load_corpus(file)
    assert bytes(corpus.valid.tokens).decode() == "é" * (corpus.valid.bytes // 2)


def parquet(file: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), file, row_group_size=40)
    return file


def test_parquet_has_the_records_of_json_lines(tmp_path):
    """Also with other columns, and in a folder with other files."""
    texts = [f"record number {n};" for n in range(100)]
    lines = tmp_path / "some.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = parquet(tmp_path / "rows.parquet", id=range(100), text=texts)
    one, other = load_corpus(lines), load_corpus(file)
    assert one.checksum == other.checksum and other.documents == 100 and other.train.records
    (tmp_path / "notes.txt").write_text("and text")
    both = load_corpus(tmp_path)
    assert both.documents == 201 and both.train.records and both.valid.records


class Shown(Bytes):
    """Messages as JSON."""

    def chat(self, messages, answer=False):
        return json.dumps(messages)


def test_messages_in_parquet_have_the_fields_that_they_were_given(tmp_path):
    """Parquet has all fields in all rows, null where there is none."""
    call = {"role": "model", "calls": [{"name": "add", "of": {"a": 1}}, {"name": "get", "of": {"b": "c"}}]}
    chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Oh"}, call]]
    corpus = load_corpus(parquet(tmp_path / "chats.parquet", messages=chats), Shown())
    found = sorted([bytes(corpus.train.tokens), bytes(corpus.valid.tokens)], key=len)
    assert [json.loads(text) for text in found] == chats


@pytest.mark.parametrize(
    "columns, said",
    [
        (dict(question=["a"], answer=["b"]), 'there is no column "text" or "messages", but question, answer'),
        (dict(text=["one", None]), 'row 2: the record has neither "text" nor "messages", but nothing'),
        (dict(text=[5]), 'row 1: "text" is a string, not 5'),
        (dict(text=["one", None], messages=[None, [3]]), 'row 2: "messages" is a list of objects such as'),
        (dict(messages=[[{"role": "user"}]]), "row 1: a conversation needs the chat template"),
    ],
)
def test_parquet_without_records(tmp_path, columns, said):
    with pytest.raises(UserError, match=f"file.parquet.*{said}"):
        load_corpus(parquet(tmp_path / "file.parquet", **columns))


def test_parquet_whose_text_is_no_text(tmp_path):
    """Arrow does not look at it when it reads."""
    table = pa.table({"text": pa.array([b"one", b"\xff"]).view(pa.string())})
    pq.write_table(table, tmp_path / "file.parquet")
    with pytest.raises(UserError, match="file.parquet: cannot be read as Parquet after row 0 .*0xff"):
        load_corpus(tmp_path / "file.parquet")


def test_damaged_parquet(tmp_path):
    file = parquet(tmp_path / "file.parquet", text=[f"{n} {n**9}" for n in range(200)])
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-20])
    with pytest.raises(UserError, match="file.parquet: cannot be read as Parquet after row 0"):
        load_corpus(file)
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    file.write_bytes(content)
    with pytest.raises(UserError, match="file.parquet: cannot be read as Parquet after row"):
        load_corpus(tmp_path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    file = parquet(tmp_path / "file.parquet", text=["one", "two"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r'Parquet needs another package: pip install "mmnnx.data."'):
        load_corpus(file)
