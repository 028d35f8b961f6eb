"""From text to batches of bytes: the files, those held out for validation, and the order of sequences."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np

from mmnnx.train.errors import UserError

HELD_OUT = 20  # one file in this many; of a single file, the last part in this many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 [size]: for training, and held out for validation."""

    train: np.ndarray
    valid: np.ndarray
    files: int

    @property
    def checksum(self) -> int:
        """The CRC-32 of the text."""
        return zlib.crc32(self.valid.data, zlib.crc32(self.train.data))


def load_corpus(path: Path | None = None) -> Corpus:
    """Read a file or a folder of UTF-8 text; None is the source text of Python's standard library.

    In a folder, hidden files and those that are not UTF-8 text are skipped. Whether a file is held out
    depends only on the checksum of its path in the folder, so adding files moves no other file.

    Raises UserError when the path is missing, unreadable, empty or holds no text.

    >>> load_corpus(Path("book.txt")).train.dtype
    dtype('uint8')
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise UserError(f"--data {root}: there is no such file or folder")
    if not root.is_dir():
        return _split_file(root)
    found = {
        name: text
        for name in _walk(root, "" if path else ".py")
        if (text := _read(root / name)) and is_text(text)
    }
    if not found:
        raise UserError(f"--data {root}: the folder holds no UTF-8 text; name a folder of text files")
    valid = [name for name in found if zlib.crc32(name.encode()) % HELD_OUT == 0] or [max(found)]
    if len(valid) == len(found):
        if len(found) == 1:
            return _split_file(root / valid[0])
        valid = valid[-1:]
    train = [name for name in found if name not in set(valid)]
    return Corpus(_join(found[name] for name in train), _join(found[name] for name in valid), len(found))


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


def _split_file(path: Path) -> Corpus:
    content = _read(path)
    if not content:
        raise UserError(f"--data {path}: the file is empty; name a file with text in it")
    if not is_text(content):
        raise UserError(f"--data {path}: this is not UTF-8 text (a binary file?); name a text file")
    text = np.frombuffer(content, np.uint8)
    end = len(text) - max(1, len(text) // HELD_OUT)
    return Corpus(text[:end], text[end:], 1)


def _join(texts) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)


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
            f"--data has {len(corpus.train)} bytes to train on, less than one batch of {batch} sequences "
            f"of {length}; give more text, or a smaller --batch or --sequence"
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
            f"--data has {len(corpus.valid)} bytes held out for validation, less than one sequence "
            f"of {length}; give more text, or a smaller --sequence"
        )
    chosen = np.linspace(0, len(windows) - 1, count * batch).astype(int)
    return np.stack([windows[i] for i in chosen]).reshape(count, batch, length + 1)
