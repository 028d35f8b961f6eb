"""Bytes on each mesh over time, below the rows of a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmnnx.inspect.colours import mesh_colour
from mmnnx.inspect.figure_style import LONGEST_NAME
from mmnnx.inspect.timeline_rows import Scale
from mmnnx.inspect.units import byte_unit, bytes_text
from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.printable import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMES = 6


def draw_bytes(axes: Axes, timeline: Timeline, meshes: Sequence[str], scale: Scale, dark: bool) -> None:
    """A line for each mesh, from dark for the first to light, with its peak; of many the names of some.

    They are bytes of the program's arrays, without XLA's temporaries. An array counts once, however many
    devices of its mesh have a copy.

    Args:
      timeline: one that has `held_bytes`.
      meshes: those to draw, in the order of the rows above.
    """
    held = timeline.held_bytes
    shown = [name for name in meshes if name in held]
    size, unit = byte_unit(max(n for name in shown for _, n in held[name]))
    every = -(-len(shown) // MOST_NAMES)
    for k, name in enumerate(shown):
        shown_name = shortened(printable(name), LONGEST_NAME)
        label = f"{shown_name}: peak {bytes_text(max(n for _, n in held[name]))}"
        axes.step(
            [*scale.spread([time for time, _ in held[name]]), scale.span + scale.room],
            [*(n / size for _, n in held[name]), held[name][-1][1] / size],
            where="post",
            color=mesh_colour(k, len(shown), dark),
            linewidth=1.1,
            clip_on=False,
            label=label if k % every == 0 else "_",
        )
    sizes = {len(timeline.mesh_devices.get(name, ())) for name in shown}
    of = f"\nof {max(sizes)} devices" if len(sizes) == 1 and max(sizes) > 1 else ""
    axes.set(xlim=(0, scale.span + scale.room), ylabel=f"{unit} of arrays\nof each mesh{of}")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.grid(axis="y", linewidth=0.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0, borderaxespad=0.4)
