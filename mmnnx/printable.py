"""Names as terminals and pictures may show them: as text, never as a command."""

from __future__ import annotations

import math
from collections.abc import Sequence


def printable(text: str, keep: str = "") -> str:
    """The text with all that is not printed spelled out: control characters, line ends, marks of direction.

    A terminal would take some of them for commands: to move the cursor, to colour, to set a title.

    Args:
      text: any.
      keep: characters to leave as they are, such as "\\n" in a message of several lines.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def first_few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Those of a list that a message has room for, and how many there are besides.

    >>> first_few(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def shortened(text: str, length: int) -> str:
    """The beginning and the end of a text that is longer than a picture has room for.

    >>> shortened("decoder_blocks_0_to_7", 10)
    'decod…to_7'
    """
    if len(text) <= length:
        return text
    return text[: math.ceil((length - 1) / 2)] + "…" + text[len(text) - (length - 1) // 2 :]
