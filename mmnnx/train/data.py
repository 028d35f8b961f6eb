"""From documents to tokens, and what of them is held out for validation."""

from __future__ import annotations

import dataclasses
import itertools
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mmnnx.train.documents import Document, documents
from mmnnx.train.errors import UserError
from mmnnx.train.tokens import Bytes, Codec

HELD_OUT = 20  # one document in this many; of a single text file, the last part in this many


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents as tokens, one after the other.

    Attributes:
      tokens: unsigned integers [count], as narrow as they can be.
      ends: where each document ends, int64 [documents].
      bytes: the size of the text.
      records: whether it comes from records, not from text files alone.
    """

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int
    records: bool = False

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @classmethod
    def of(cls, parts: Iterable[np.ndarray], size: int, records: bool = False) -> Text:
        """Documents, of which each is an array of tokens, and the size of their text."""
        parts = list(parts)
        return cls(np.concatenate(parts), np.cumsum([len(part) for part in parts]), size, records)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text for training, and text held out for validation.

    Attributes:
      files: the number of documents.
      unit: what a token is called.
    """

    train: Text
    valid: Text
    files: int
    unit: str = "byte"

    @property
    def checksum(self) -> int:
        """The CRC-32 of the tokens and of where documents end."""
        found = 0
        for text in (self.train, self.valid):
            found = zlib.crc32(text.ends.data, zlib.crc32(text.tokens.data, found))
        return found

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text."""
        return self.valid.bytes / len(self.valid)


def load_corpus(path: Path | None = None, codec: Codec | None = None) -> Corpus:
    """Read text; None is the source text of Python's standard library.

    A file or a folder of UTF-8 text, or of records in JSON Lines (`.jsonl`) or Parquet (`.parquet`), each
    with "text", or with "messages" for the model's chat template. A text file and a record are documents. In
    a folder, hidden files and those that are not UTF-8 text are skipped. Whether a document is held out
    depends only on the checksum of its path in the folder, or of its record, so adding others moves none.

    Raises UserError when the path is missing, unreadable, empty or holds no text, and for a line or row that
    is no such record.

    Example:
      >>> _ = Path("book.txt").write_text("Call me Ishmael. " * 100)
      >>> load_corpus(Path("book.txt")).train.tokens.dtype
      dtype('uint8')
    """
    codec = codec or Bytes()
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UserError(f"--data {root}: there is no such file or folder")
    others = documents(root, codec, "" if path else ".py")
    first = list(itertools.islice(others, 2))
    if not first:
        raise UserError(f"--data {root}: there is no UTF-8 text in it; name a folder of text files")
    if len(first) == 1:
        return _split(first[0], codec)
    keys, sizes, tokens, records = [], [], [], False
    for document in itertools.chain(first, others):
        keys.append(document.key)
        sizes.append(len(document.text))
        tokens.append(codec.encode(document.text))
        records |= document.record
    held_out = [key % HELD_OUT == 0 for key in keys]
    if all(held_out) or not any(held_out):  # one of them, the same wherever the others come
        last = keys.index(max(keys))
        held_out = [n == last for n in range(len(keys))]
    train, valid = (
        Text.of(
            (part for part, held in zip(tokens, held_out) if held == wanted),
            sum(size for size, held in zip(sizes, held_out) if held == wanted),
            records,
        )
        for wanted in (False, True)
    )
    return Corpus(train, valid, len(keys), codec.unit)


def _split(document: Document, codec: Codec) -> Corpus:
    """A corpus of one text file, whose end is held out."""
    content = document.text
    if document.record:
        raise UserError(f"--data {document.file}: there is one record; one more is needed to validate with")
    if not content:
        raise UserError(f"--data {document.file}: the file is empty; name a file with text in it")
    end = len(content) - max(1, len(content) // HELD_OUT)
    while end and content[end] & 0xC0 == 0x80:  # not within a character
        end -= 1
    train, valid = (Text.of([codec.encode(part)], len(part)) for part in (content[:end], content[end:]))
    return Corpus(train, valid, 1, codec.unit)
