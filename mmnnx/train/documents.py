"""The documents of `--data`: files of text, and records in JSON Lines and Parquet."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmnnx.train.assistant import LossOn, conversation
from mmnnx.train.errors import UserError
from mmnnx.train.tokens import Codec


@dataclasses.dataclass(frozen=True)
class Document:
    """A text.

    Attributes:
      text: UTF-8.
      file: where it is.
      record: whether it is one of the records in that file; otherwise it is the file.
      key: the CRC-32 of its text if it is a record, else of its path in the folder: what is held out depends
        on it.
      in_loss: which of its bytes are in the loss, bool [bytes]; None: all of them.
      chat: whether it is a conversation.
    """

    text: bytes
    file: Path
    record: bool
    key: int
    in_loss: np.ndarray | None = None
    chat: bool = False


def documents(root: Path, codec: Codec, suffix: str = "", loss_on: LossOn = "all") -> Iterator[Document]:
    """The documents in a file or a folder, one after the other, in an order that is the same anywhere.

    In a folder, hidden files and those that are neither records nor UTF-8 text are skipped.

    Args:
      root: the file or folder.
      codec: whose chat template makes text of messages.
      suffix: files with other endings are skipped, in a folder.
      loss_on: with "assistant", what it writes in messages is alone in the loss.

    Raises:
      UserError: for what cannot be read, and for records that are none; names the file, and the line or row.
    """
    for name in _walk(root, suffix) if root.is_dir() else [""]:
        file = root / name if name else root
        if read := RECORDS.get(file.suffix):
            for where, record in read(file):
                text, in_loss = _text_of(record, codec, loss_on, where)
                yield Document(text, file, True, zlib.crc32(text), in_loss, chat=record.get("text") is None)
        else:
            text = _read(file)
            if is_text(text):
                yield Document(text, file, False, zlib.crc32(name.encode()))
            elif not name:
                raise UserError(f"--data {file}: this is not UTF-8 text (a binary file?); name a text file")


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


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"--data {file}: cannot be read ({error.strerror}); check its permissions")


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Each record and where it is."""
    try:
        lines = file.open("rb")
    except OSError as error:
        raise _unreadable(file, error) from error
    with lines:
        for number, line in enumerate(lines, 1):
            where = f"--data {file}, line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: this is no JSON ({error})") from error
            yield where, record


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    """Each record and where it is; some rows are in memory at a time, and no columns but those of text."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            f'--data {file}: Parquet needs another package: pip install "mmnnx[data]" ({error})'
        ) from error
    row = 0
    try:
        with ParquetFile(file) as table:
            names = table.schema_arrow.names
            columns = [name for name in ("text", "messages") if name in names]
            if not columns:
                raise UserError(f'--data {file}: there is no column "text" or "messages", but {_list(names)}')
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield f"--data {file}, row {row}", _without_nulls(record)
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {file}: cannot be read as Parquet after row {row} ({error})") from error


RECORDS = {".jsonl": _json_lines, ".parquet": _parquet}


def _without_nulls(value: Any) -> Any:
    """A row as JSON Lines would have it: the fields that other rows alone have are null in Parquet."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text_of(record: Any, codec: Codec, loss_on: LossOn, where: str) -> tuple[bytes, np.ndarray | None]:
    """The text of a record, and which part of it is in the loss."""
    if not isinstance(record, dict):
        raise UserError(f'{where}: a record is a JSON object with "text" or "messages", not {record!r:.40}')
    text, messages = record.get("text"), record.get("messages")
    if text is None and messages is None:
        raise UserError(f'{where}: the record has neither "text" nor "messages", but {_list(record)}')
    try:
        if isinstance(text, str):
            return text.encode(), None
        if text is None and isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
            if loss_on == "assistant":
                return conversation(codec, messages)
            return codec.chat(messages).encode(), None
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except UnicodeEncodeError as error:  # JSON may have half a pair of surrogates
        raise UserError(f"{where}: this is no text ({error})") from error
    if text is not None:
        raise UserError(f'{where}: "text" is a string, not {text!r:.40}')
    raise UserError(f'{where}: "messages" is a list of objects such as {MESSAGE}, not {messages!r:.40}')


MESSAGE = '{"role": "user", "content": "Hello"}'


def _list(names: Any) -> str:
    return f"{', '.join(names)[:80]}" if names else "nothing"
