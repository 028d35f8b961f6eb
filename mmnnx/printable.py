"""Names as terminals and pictures may show them: as text, never as a command."""

from __future__ import annotations

import math


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


def shortened(text: str, length: int) -> str:
    """The beginning and the end of a text that is longer than a picture has room for.

    >>> shortened("decoder_blocks_0_to_7", 10)
    'decod…to_7'
    """
    if len(text) <= length:
        return text
    return text[: math.ceil((length - 1) / 2)] + "…" + text[len(text) - (length - 1) // 2 :]
