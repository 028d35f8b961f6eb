"""Which part of a conversation the assistant writes: with `--loss-on assistant` it alone is in the loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mmnnx.train.errors import UserError
from mmnnx.train.tokens import Codec

LossOn = Literal["all", "assistant"]
ROLES = ("assistant", "model")
ADVICE = (
    "Put {% generation %} and {% endgeneration %} around what the assistant writes in the chat template, or "
    "give --loss-on all"
)


def conversation(codec: Codec, messages: list[Mapping[str, Any]]) -> tuple[bytes, np.ndarray]:
    """The text of a conversation, and which part of it the assistant writes.

    A chat template may say it with `{% generation %}` blocks, as for `return_assistant_tokens_mask` of
    `transformers`. Without them it is what each message of the assistant adds to the text: all from the
    prompt for its answer to the token that ends its turn.

    Returns:
      UTF-8, and which of its bytes the assistant writes: bool [bytes].

    Raises:
      UserError: for messages that the template refuses, for a template that does not render them one after
        the other, and where nothing is the assistant's.

    Example:
      >>> from mmnnx.train.tokens import Bytes
      >>> class Lines(Bytes):  # in place of a published tokenizer
      ...     def chat(self, messages, answer=False, marks=None):
      ...         lines = [f"{m['role']}: {m['content']}\\n" for m in messages]
      ...         return "".join(lines) + "assistant: " * answer
      >>> said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
      >>> text, written = conversation(Lines(), said)
      >>> "".join(chr(byte) for byte, own in zip(text, written) if own)
      '2\\n'
    """
    text = codec.chat(messages)
    written = np.zeros(len(text.encode()), bool)
    for start, end in _marked(codec, messages, text) or _added(codec, messages, text):
        first, last = (len(text[:place].encode()) for place in (start, end))
        written[first:last] = True
    if not written.any():
        raise UserError(
            f"no message is the assistant's, with the role {' or '.join(map(repr, ROLES))} and some content; "
            "leave it out, or give --loss-on all"
        )
    return text.encode(), written


def _marked(codec: Codec, messages: list[Mapping[str, Any]], text: str) -> list[tuple[int, int]]:
    """From where to where the template's `{% generation %}` blocks are in the text, in characters."""
    # Noncharacters of Unicode around a number: the first for which the text has no such marks of its own.
    tries = ((f"\ufdd0{n}\ufdd1", f"\ufdd2{n}\ufdd3") for n in itertools.count())
    start, end = next(marks for marks in tries if not any(mark in text for mark in marks))
    pieces = re.split(f"({start}|{end})", codec.chat(messages, marks=(start, end)))
    marks = pieces[1::2]
    if not marks:
        return []
    if "".join(pieces[::2]) != text or marks != [start, end] * (len(marks) // 2):
        raise UserError(
            f"the {{% generation %}} blocks of the chat template cannot be found in its text. {ADVICE}"
        )
    places = np.cumsum([len(piece) for piece in pieces[::2]])
    return list(zip(places[:-1:2].tolist(), places[1::2].tolist()))


def _added(codec: Codec, messages: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int]]:
    """From where to where each message of the assistant is in the text, in characters."""
    found = []
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            continue
        try:
            before = codec.chat([*messages[:number]], answer=True)
            after = codec.chat([*messages[: number + 1]])
        except UserError as error:
            raise UserError(
                f"the chat template refuses the messages up to number {number + 1} alone: {error}. {ADVICE}"
            ) from error
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"what the assistant writes in message {number + 1} cannot be told: the chat template "
                f"renders the messages before it, or up to it, otherwise when others follow. {ADVICE}"
            )
        ended = after.rstrip()  # a template may add space after the token that ends a turn
        found.append((len(before), len(ended if ended.endswith(codec.special) else after)))
    return found
