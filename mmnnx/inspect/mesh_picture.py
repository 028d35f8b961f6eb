"""The picture of a MultiMesh: its devices by axis, coloured by the tasks that have state on them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

import jax

from mmnnx.inspect.colours import mesh_colour, text_colour
from mmnnx.inspect.figure_style import TEXT, WIDTH, settle_ticks, styled
from mmnnx.printable import shortened
from mmnnx.sharding.mesh import MultiMesh, devices_key, idle_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT = 8.0  # inches that all rows share at most
MOST_NAMES = 12
LETTERS = 90  # in a line of the legend; a box and the gaps beside it are 6


def draw_mesh(mesh: MultiMesh, *, dark: bool = False) -> Figure:
    """Devices as boxes with their ids: the first axis from left to right, all others from top to bottom.

    They are coloured by the tasks that have state on them, which is known once a TaskSharding has placed
    some. The names of the tasks are in the boxes or, where they have no room, in a legend.

    >>> draw_mesh(mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))).savefig("mesh.png")
    """
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.patches import Patch, Rectangle

    first, *others = mesh.axis_names
    columns, rows = mesh.shape[first], list(product(*(range(mesh.shape[axis]) for axis in others)))
    tasks = tasks_of_devices(mesh)
    groups = list(dict.fromkeys(tasks.values()))
    with styled(dark) as look:
        colours = {name: mesh_colour(n, len(groups), dark) for n, name in enumerate(groups)}
        row = min(0.36, HEIGHT / len(rows))
        room = 72 * (WIDTH - 2) / columns / (0.68 * TEXT)  # letters
        named = bool(groups) and row > 0.2 and all(len(f"device 0000: {name}") < room for name in groups)
        names = [shortened(name, LETTERS - 6) for name in groups[:MOST_NAMES]]
        across = max(1, min(4, LETTERS // (6 + max(map(len, names), default=0))))
        legend = 0 if named else 0.25 * -(-min(len(groups), MOST_NAMES + 1) // across)
        figure = Figure(figsize=(WIDTH, 0.85 + row * len(rows) + legend), layout="constrained")
        axes = figure.add_subplot()
        letters = max(len(str(device.id)) for device in mesh.devices.flat)
        size = min(TEXT, 72 * (WIDTH - 1.5) / columns / (0.8 * letters), 50 * row)
        for x, (y, at) in product(range(columns), enumerate(rows)):
            device = mesh.devices[(x, *at)]
            colour = colours.get(tasks.get(device, ""), look.pale)
            axes.add_patch(
                Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=colour, edgecolor=look.faint, lw=0.4)
            )
            if size >= 4:
                label = str(device.id)
                if named:
                    label = f"device {device.id}" + (f": {tasks[device]}" if device in tasks else "")
                axes.text(x, y, label, fontsize=size, color=text_colour(colour), ha="center", va="center")
        labels = [", ".join(f"{axis}={n}" for axis, n in zip(others, at)) for at in rows]
        every, each = -(-len(rows) * 10 // round(HEIGHT * 72)), -(-columns * (len(first) + 3) // 90)
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.45, -0.55))
        axes.set_xticks(range(0, columns, each), [f"{first}={n}" for n in range(0, columns, each)])
        axes.set_yticks(range(0, len(rows), every), labels[::every])
        axes.xaxis.tick_top()
        axes.spines[:].set_visible(False)
        settle_ticks(axes, look)
        axes.tick_params(length=0)
        axes.set_title(title_of(mesh), pad=10)
        handles = [Patch(color=colours[group], label=name) for group, name in zip(groups, names)]
        if len(groups) > MOST_NAMES:
            handles.append(Patch(color="none", label=f"{len(groups) - MOST_NAMES} more"))
        if handles and not named:
            figure.legend(handles=handles, loc="outside lower left", ncols=across, handlelength=1.2)
        return figure


def title_of(mesh: MultiMesh) -> str:
    """The number of its devices, its axes, and what is idle: "4 cpu devices: stage=4; idle: devices 4-7"."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    idle = f"; {idle_text(mesh.idle)}" if mesh.idle else ""
    return f"{mesh.size} {mesh.devices.flat[0].platform} device{'s' * (mesh.size > 1)}: {axes}{idle}"


def tasks_of_devices(mesh: MultiMesh) -> Mapping[jax.Device, str]:
    """For each device that has state of tasks, their names."""
    found: dict[jax.Device, dict[str, None]] = {}
    known = dict(zip(devices_key(mesh.mesh), mesh.devices.flat))
    for devices, names in mesh.registry.tasks_by_devices().items():
        for device in devices:
            if device in known:
                found.setdefault(known[device], {})[names] = None
    return {device: ", ".join(found[device]) for device in mesh.devices.flat if device in found}
