"""From documents to tokens, and what of them is held out for validation."""

from __future__ import annotations

import dataclasses
import itertools
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mmnnx.train.assistant import LossOn
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
      bytes: the size of the text that is in the loss.
      records: whether it comes from records, not from text files alone.
      in_loss: which tokens are in the loss, bool [count]; None: all of them.
    """

    tokens: np.ndarray
    ends: np.ndarray
    bytes: int
    records: bool = False
    in_loss: np.ndarray | None = None

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def counted(self) -> int:
        """The number of tokens that are in the loss."""
        return len(self) if self.in_loss is None else int(np.count_nonzero(self.in_loss))

    def weights(self, start: int, size: int) -> np.ndarray:
        """The weights in the loss of `size` tokens, from number `start` on: float32 [size], 1 or 0."""
        if self.in_loss is None:
            return np.ones(size, np.float32)
        return self.in_loss[start : start + size].astype(np.float32)

    def count(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """How many tokens of each piece are in the loss: int [pieces], as `starts` and `sizes` are."""
        if self.in_loss is None:
            return sizes
        so_far = np.append(0, np.cumsum(self.in_loss))
        return so_far[starts + sizes] - so_far[starts]

    @classmethod
    def of(
        cls,
        parts: Iterable[np.ndarray],
        size: int,
        records: bool = False,
        in_loss: Iterable[np.ndarray | None] = (),
    ) -> Text:
        """Documents, of which each is an array of tokens.

        Args:
          size: of the text that is in the loss, in bytes.
          in_loss: which tokens of each are, bool; None: all of them.
        """
        parts, masks = list(parts), list(in_loss)
        text = cls(np.concatenate(parts), np.cumsum([len(part) for part in parts]), size, records)
        if all(mask is None for mask in masks):
            return text
        of_all = [np.ones(len(p), bool) if mask is None else mask for p, mask in zip(parts, masks)]
        return dataclasses.replace(text, in_loss=np.concatenate(of_all))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text for training, and text held out for validation.

    Attributes:
      documents: how many there are: text files and records.
      unit: what a token is called.
    """

    train: Text
    valid: Text
    documents: int
    unit: str = "byte"

    @property
    def checksum(self) -> int:
        """The CRC-32 of the tokens, of where documents end, and of what is in the loss."""
        found = 0
        for text in (self.train, self.valid):
            found = zlib.crc32(text.ends.data, zlib.crc32(text.tokens.data, found))
            if text.in_loss is not None:
                found = zlib.crc32(text.in_loss.data, found)
        return found

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text that is in the loss."""
        return self.valid.bytes / self.valid.counted


def load_corpus(path: Path | None = None, codec: Codec | None = None, loss_on: LossOn = "all") -> Corpus:
    """Read text; None is the source text of Python's standard library.

    A file or a folder of UTF-8 text, or of records in JSON Lines (`.jsonl`) or Parquet (`.parquet`), each
    with "text", or with "messages" for the model's chat template. A text file and a record are documents. In
    a folder, hidden files and those that are not UTF-8 text are skipped. Whether a document is held out
    depends only on the checksum of its path in the folder, or of its record, so adding others moves none.

    With `loss_on` "assistant", what the assistant writes in messages is alone in the loss; texts are as ever.

    Raises UserError when the path is missing, unreadable, empty or holds no text, for a line or row that is
    no such record, and where `loss_on` is for messages and there are none.

    Example:
      >>> _ = Path("book.txt").write_text("Call me Ishmael. " * 100)
      >>> load_corpus(Path("book.txt")).train.tokens.dtype
      dtype('uint8')
    """
    codec = codec or Bytes()
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UserError(f"--data {root}: there is no such file or folder")
    others = documents(root, codec, "" if path else ".py", loss_on)
    first = list(itertools.islice(others, 2))
    if not first:
        what = "UTF-8 text in it; name a folder of text files" if root.is_dir() else "record in it"
        raise UserError(f"--data {root}: there is no {what}")
    corpus = _split(first[0], codec) if len(first) == 1 else _divide(itertools.chain(first, others), codec)
    if loss_on == "assistant" and corpus.train.in_loss is None and corpus.valid.in_loss is None:
        raise UserError(
            f'--data {root}: --loss-on assistant is for records with "messages", and there are none'
        )
    return corpus


def _divide(documents: Iterable[Document], codec: Codec) -> Corpus:
    """A corpus of several documents, some of which are held out."""
    keys, sizes, tokens, masks, records = [], [], [], [], False
    for document in documents:
        if document.in_loss is None:
            found, in_loss, size = codec.encode(document.text, document.chat), None, len(document.text)
        else:
            found, in_loss = codec.encode_parts(document.text, document.in_loss)
            size = int(document.in_loss.sum())
        keys.append(document.key)
        sizes.append(size)
        tokens.append(found)
        masks.append(in_loss)
        records |= document.record
    held_out = [key % HELD_OUT == 0 for key in keys]
    if all(held_out) or not any(held_out):  # one of them, the same wherever the others come
        last = keys.index(max(keys))
        held_out = [n == last for n in range(len(keys))]

    def of(wanted: bool) -> Text:
        chosen = [n for n, held in enumerate(held_out) if held == wanted]
        parts = (tokens[n] for n in chosen)
        return Text.of(parts, sum(sizes[n] for n in chosen), records, [masks[n] for n in chosen])

    return Corpus(of(False), of(True), len(keys), codec.unit)


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
