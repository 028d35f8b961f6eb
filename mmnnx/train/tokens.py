"""Text to tokens and back: bytes, or the tokenizer of a published model with its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmnnx.json_object import read_json_object
from mmnnx.train.errors import UserError

Marks = tuple[str, str] | None


class Codec(Protocol):
    """How text is made of tokens.

    Attributes:
      vocab: tokens are below it.
      unit: what a token is called: "byte" or "token".
      end: the token that ends a text; None without one.
      ends: all tokens after which a model writes no more, as the one that ends a turn.
      special: the text of tokens that stand for no text, such as the one that ends a turn.
    """

    vocab: int
    unit: str
    end: int | None
    ends: tuple[int, ...]
    special: tuple[str, ...]

    def encode(self, text: bytes, chat: bool = False) -> np.ndarray:
        """The tokens of a document of UTF-8, unsigned integers [count], with what begins and ends it.

        Args:
          chat: it is a conversation, whose template has put in what begins it.
        """

    def encode_parts(self, text: bytes, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and which of them are in parts of the text, bool [bytes]: bool [count]."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""

    def chat(self, messages: list[Mapping[str, Any]], answer: bool = False, marks: Marks = None) -> str:
        """The text of a conversation.

        Args:
          answer: it goes up to where the model's next answer begins.
          marks: two strings, which are put around what is in `{% generation %}` blocks of the template.
        """


class Bytes:
    """A token for each byte.

    Example:
      >>> Bytes().encode("hé".encode())
      array([104, 195, 169], dtype=uint8)
    """

    vocab, unit = 256, "byte"
    end: int | None = None
    ends: tuple[int, ...] = ()
    special: tuple[str, ...] = ()

    def encode(self, text: bytes, chat: bool = False) -> np.ndarray:
        """The bytes, uint8 [count]."""
        return np.frombuffer(text, np.uint8)

    def encode_parts(self, text: bytes, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes, uint8 [count], and the parts as they are."""
        return self.encode(text), parts

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of bytes; those that are no text show as �."""
        return bytes(min(int(token), 255) for token in tokens).decode(errors="replace")

    def chat(self, messages: list[Mapping[str, Any]], answer: bool = False, marks: Marks = None) -> str:
        """Refused: which bytes a model takes for a turn of a conversation is its tokenizer's to say.

        Raises:
          UserError: always.
        """
        raise UserError(
            "a conversation needs the chat template of a published model, and a model of bytes has none"
        )


class HubTokenizer:
    """The tokenizer in the folder of a published model, by the `tokenizers` library.

    Args:
      folder: with `tokenizer.json`, and perhaps a chat template in `chat_template.jinja` or
        `tokenizer_config.json`.

    Raises:
      UserError: for files that are missing or cannot be read.
    """

    unit = "token"

    def __init__(self, folder: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError(f'--model needs more packages: pip install "mmnnx[hf]" ({error})') from error
        self.folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # a file may ask for both, of which a text in training knows nothing
        self._tokenizer.no_padding()
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab = 1 + max(numbers, default=0)  # numbers may have gaps
        files = ("special_tokens_map.json", "tokenizer_config.json")
        fields = [field for file in files for field in _json(folder / file).items()]
        self._fields = {name: value for name, value in fields if value is not None}
        self.ends = tuple(dict.fromkeys([*self._named_end(), *self._numbered_ends()]))
        self.end = self.ends[0] if self.ends else None
        self._begin = self._find_begin()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)

    def encode(self, text: bytes, chat: bool = False) -> np.ndarray:
        """The tokens, uint16 or as the vocabulary needs, [count]; the token that ends a text is the last.

        The first are those that the tokenizer puts before a text, but not before a conversation.
        """
        found = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        begins = chat or found[: len(self._begin)] == self._begin
        return self._ended(found if begins else self._begin + found)

    def encode_parts(self, text: bytes, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and which of them are in parts of the text, bool [bytes]: bool [count].

        A token that is partly in them counts. One that is added to end the text counts if the one before it
        does, and is not special: that one has ended it.
        """
        found = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        tokens = self._ended(found.ids)
        begins_character = np.frombuffer(text, np.uint8) & 0xC0 != 0x80
        places = np.append(np.flatnonzero(begins_character), len(text))
        first, last = places[np.array(found.offsets, int).reshape(-1, 2)].T
        last = np.clip(last, first + 1, len(text))  # a space may have no offsets of its own
        so_far = np.append(0, np.cumsum(parts))
        inside = so_far[last] > so_far[first]
        if len(tokens) > len(inside):
            inside = np.append(inside, inside[-1:].any() and not text.decode().endswith(self.special))
        return tokens, inside

    def _ended(self, tokens: list[int]) -> np.ndarray:
        ended = self.end is None or tokens[-1:] == [self.end]
        return np.array(tokens if ended else [*tokens, self.end], np.min_scalar_type(self.vocab - 1))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def chat(self, messages: list[Mapping[str, Any]], answer: bool = False, marks: Marks = None) -> str:
        """The text of a conversation, by the model's chat template.

        Args:
          answer: it goes up to where the model's next answer begins.
          marks: two strings, which are put around what is in `{% generation %}` blocks of the template.

        Raises:
          UserError: without a template, or for messages that it refuses.
        """
        given: dict[str, Any] = {"bos_token": "", "eos_token": ""}
        given |= {name: self._special(name) for name in self._fields if name.endswith("_token")}
        given |= dict(messages=messages, add_generation_prompt=answer, marks=marks)
        given |= dict(tools=None, documents=None)
        try:
            return self._template.render(**given)
        except UserError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise UserError(f"the chat template of {self.folder} refuses messages: {error}") from error

    @cached_property
    def _template(self) -> Any:
        from mmnnx.train.chat_template import read_template

        file, template = self.folder / "chat_template.jinja", self._fields.get("chat_template")
        if isinstance(template, list):  # of several, each with a name
            template = {one["name"]: one["template"] for one in template}.get("default")
        template = file.read_text() if file.is_file() else template
        if not isinstance(template, str):
            raise UserError(f"{self.folder} has no chat template, which records with messages need")
        return read_template(template)

    def _find_begin(self) -> list[int]:
        """The tokens that `transformers` puts before a text."""
        name, asked = self._special("bos_token"), self._fields.get("add_bos_token")
        if isinstance(asked, bool) and name is not None:
            number = self._tokenizer.token_to_id(name)
            return [] if number is None or not asked else [number]
        text, whole = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        at = (n for n in range(len(whole)) if whole[n : n + len(text)] == text)
        return whole[: next(at, 0)]

    def _named_end(self) -> list[int]:
        """The token that ends a text, if the tokenizer names one that it has."""
        name = self._special("eos_token")
        found = None if name is None else self._tokenizer.token_to_id(name)
        return [] if found is None else [found]

    def _numbered_ends(self) -> list[int]:
        """The tokens after which the model writes no more, by their numbers in its files."""
        for file in ("generation_config.json", "config.json"):
            found = _json(self.folder / file).get("eos_token_id")
            found = found if isinstance(found, list) else [found]
            if known := [n for n in found if isinstance(n, int) and 0 <= n < self.vocab]:
                return known
        return []

    def _special(self, name: str) -> str | None:
        found = self._fields.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        if not isinstance(found, str | None):
            raise UserError(f"{self.folder}: {name} of the tokenizer is a text, not {found!r}")
        return found


def codec_of(model: Path | None) -> Codec:
    """The tokenizer of a published model; bytes without a model, or for one that has no tokenizer."""
    if model is None or not (model / "tokenizer.json").exists():
        return Bytes()
    return HubTokenizer(model)


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file) if file.is_file() else {}
    except ValueError as error:
        raise UserError(str(error)) from error
