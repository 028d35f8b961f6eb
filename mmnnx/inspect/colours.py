"""Colours that mean the same in all pictures: kinds of memory, and meshes. `phase_styles` has phases."""

from __future__ import annotations

MEMORY = {
    "weights": ("#4a3d92", "#aaa1dd"),
    "optimizer state": ("#964a80", "#dcaece"),
    "gradients": ("#22685e", "#22685e"),
    "saved activations": ("#5a9e93", "#5a9e93"),
    "other arguments": ("#9aa2ab", "#9aa2ab"),
    "other values": ("#b9c0c7", "#b9c0c7"),
    "temporaries": ("#ad8b60", "#ad8b60"),
    "other": ("#8b949e", "#8b949e"),
}
"""For each kind of memory, the colours of its first part and of its last. None is the colour of a phase."""
TOO_MUCH = {"weights": ("#7d1010", "#c94f45"), "optimizer state": ("#d97b70", "#efbfb7")}
"""The same for devices whose memory is too small; what a step adds keeps its colour."""
OTHER = "#c4cad1"
"""Of several parts together."""
LIMIT = "#bf4138"


def memory_colour(kind: str, nth: int = 0, of: int = 1, too_much: bool = False) -> str:
    """The colour of part number `nth` (from 0) of the `of` parts of a kind of memory.

    >>> memory_colour("weights", 0, 2), memory_colour("weights", 1, 2)
    ('#4a3d92', '#aaa1dd')
    """
    styles = MEMORY | TOO_MUCH if too_much else MEMORY
    return blend(*styles[kind], nth, of) if kind in styles else OTHER


def mesh_colour(nth: int, of: int, dark: bool = False) -> str:
    """The colour of mesh number `nth` of `of`, from dark to light; lighter on dark paper."""
    from matplotlib import colormaps  # slow to import
    from matplotlib.colors import to_hex

    at = nth / max(1, of - 1)
    return to_hex(colormaps["viridis"](0.4 + 0.58 * at if dark else 0.08 + 0.8 * at))


def blend(first: str, last: str, nth: int, of: int) -> str:
    """The colour number `nth` of `of` between two, as "#rrggbb"."""
    part = nth / max(1, of - 1)
    return "#" + "".join(
        f"{round(a + part * (b - a)):02x}" for a, b in zip(_channels(first), _channels(last))
    )


def text_colour(colour: str) -> str:
    """Black or white, whichever is legible on a colour."""
    red, green, blue = _channels(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 125 else "#000000"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
