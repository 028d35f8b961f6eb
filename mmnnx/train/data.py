"""From text to batches of tokens: the files, what is held out for validation, and the order of sequences."""

from __future__ import annotations

import dataclasses
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np

from mmnnx.train.errors import UserError
from mmnnx.train.tokens import Bytes, Codec

HELD_OUT = 20  # one document in this many; of a single text file, the last part in this many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as tokens, uint8 or int32 [count]: for training, and held out for validation.

    Attributes:
      files: the number of documents.
      train_bytes, valid_bytes: the sizes of the text.
      unit: what a token is called.
    """

    train: np.ndarray
    valid: np.ndarray
    files: int
    train_bytes: int
    valid_bytes: int
    unit: str = "byte"

    @property
    def checksum(self) -> int:
        """The CRC-32 of the tokens."""
        return zlib.crc32(self.valid.data, zlib.crc32(self.train.data))

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text."""
        return self.valid_bytes / len(self.valid)


def load_corpus(path: Path | None = None, codec: Codec | None = None) -> Corpus:
    """Read text; None is the source text of Python's standard library.

    A file or a folder of UTF-8 text, or of JSON Lines (`.jsonl`), each line a record with "text", or with
    "messages" for the model's chat template. A text file and a record are documents. In a folder, hidden
    files and those that are not UTF-8 text are skipped. Whether a document is held out depends only on the
    checksum of its path in the folder, or of its record, so adding others moves none.

    Raises UserError when the path is missing, unreadable, empty or holds no text, and for a line that is no
    such record.

    >>> load_corpus(Path("book.txt")).train.dtype
    dtype('uint8')
    """
    codec = codec or Bytes()
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UserError(f"--data {root}: there is no such file or folder")
    if not root.is_dir() and root.suffix != RECORDS:
        return _split_file(root, codec)
    names = _walk(root, "" if path else ".py") if root.is_dir() else [""]
    found = [document for name in names for document in _documents(root, name, codec)]
    if not found:
        raise UserError(f"--data {root}: there is no UTF-8 text in it; name a folder of text files")
    if len(found) == 1:
        if found[0].path is None:
            raise UserError(f"--data {root}: there is one record; one more is needed to validate with")
        return _split_file(root / found[0].path, codec)
    held_out = [zlib.crc32(document.key.encode()) % HELD_OUT == 0 for document in found]
    if all(held_out) or not any(held_out):  # one of them, the same wherever the others come
        last = max(range(len(found)), key=lambda n: found[n].key)
        held_out = [n == last for n in range(len(found))]
    texts = [[d.text for d, held in zip(found, held_out) if held == wanted] for wanted in (False, True)]
    train, valid = (np.concatenate([codec.encode(text) for text in part]) for part in texts)
    train_bytes, valid_bytes = (sum(map(len, part)) for part in texts)
    return Corpus(train, valid, len(found), train_bytes, valid_bytes, codec.unit)


RECORDS = ".jsonl"


@dataclasses.dataclass(frozen=True)
class _Document:
    """A text; `key` says whether it is held out, `path` is that of its file in the folder unless a record."""

    key: str
    text: bytes
    path: str | None


def _documents(root: Path, name: str, codec: Codec) -> Iterator[_Document]:
    """The documents in a file."""
    file = root / name if name else root
    content = _read(file)
    if file.suffix != RECORDS:
        if is_text(content):
            yield _Document(name, content, name)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            text = _text_of(line, codec, f"--data {file}, line {number}")
            yield _Document(text.decode(), text, None)


def _text_of(line: bytes, codec: Codec, where: str) -> bytes:
    """The text of a record."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: this is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f'{where}: a record is a JSON object with "text" or "messages", not {record!r:.40}')
    if isinstance(text := record.get("text"), str):
        return text.encode()
    if isinstance(messages := record.get("messages"), list):
        return codec.chat(messages).encode()
    raise UserError(f'{where}: the record has neither "text" nor "messages", but {", ".join(record)[:80]}')


def is_text(content: bytes) -> bool:
    """Whether ``content`` is UTF-8 without NUL bytes."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _walk(root: Path, suffix: str) -> Iterator[str]:
    """Paths of the files below ``root``, relative to it, in an order that does not depend on the machine."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in ("site-packages", "dist-packages")
        )
        for file in sorted(files):
            path = Path(folder) / file
            special = path.exists() and not path.is_file()  # such as a pipe, which may never end
            if file.endswith(suffix) and not file.startswith(".") and not special:
                yield path.relative_to(root).as_posix()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read ({error.strerror}); check its permissions") from error


def _split_file(path: Path, codec: Codec) -> Corpus:
    content = _read(path)
    if not content:
        raise UserError(f"--data {path}: the file is empty; name a file with text in it")
    if not is_text(content):
        raise UserError(f"--data {path}: this is not UTF-8 text (a binary file?); name a text file")
    end = len(content) - max(1, len(content) // HELD_OUT)
    while end and content[end] & 0xC0 == 0x80:  # not within a character
        end -= 1
    train, valid = (codec.encode(part) for part in (content[:end], content[end:]))
    return Corpus(train, valid, 1, end, len(content) - end, codec.unit)


class Windows:
    """``text`` as consecutive sequences of ``length`` tokens and the one after them, int32 [length + 1]."""

    def __init__(self, text: np.ndarray, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.length
        return self.text[start : start + self.length + 1].astype(np.int32)


def train_batches(corpus: Corpus, batch: int, length: int, seed: int) -> grain.DatasetIterator:
    """Endless batches int32 [batch, length + 1] of training text, shuffled anew in each epoch.

    The iterator's ``get_state()`` and ``set_state()`` get and set its position.
    Raises UserError when the text is shorter than one batch.
    """
    windows = Windows(corpus.train, length)
    if len(windows) < batch:
        raise UserError(
            f"--data has {len(corpus.train)} {corpus.unit}s to train on, less than one batch of {batch} "
            f"sequences of {length}; give more text, or a smaller --batch or --sequence"
        )
    dataset = grain.MapDataset.source(windows).shuffle(seed=seed).repeat().batch(batch, drop_remainder=True)
    return iter(dataset.to_iter_dataset())


def valid_batches(corpus: Corpus, batch: int, length: int, count: int = 4) -> np.ndarray:
    """``count`` batches of held-out text, int32 [count, batch, length + 1], always the same, spread over it.

    Raises UserError when less than one sequence is held out.
    """
    windows = Windows(corpus.valid, length)
    if not len(windows):
        raise UserError(
            f"--data has {len(corpus.valid)} {corpus.unit}s held out for validation, less than one sequence "
            f"of {length}; give more text, or a smaller --sequence"
        )
    chosen = np.linspace(0, len(windows) - 1, count * batch).astype(int)
    return np.stack([windows[i] for i in chosen]).reshape(count, batch, length + 1)
