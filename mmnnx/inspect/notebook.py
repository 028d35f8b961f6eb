"""What a notebook shows of a Program, a MultiMesh and a TaskSharding: see `mmnnx._shown`; and of a model."""

from __future__ import annotations

import base64
import html as text_to_html
from collections import Counter
from typing import Any

from flax import nnx
from rich import box
from rich.table import Table
from rich.text import Text

from mmnnx._shown import notebook_bundle
from mmnnx.inspect.cells import cell
from mmnnx.inspect.figure_bytes import picture_bundle, picture_bytes
from mmnnx.inspect.locations import spec_text
from mmnnx.inspect.mesh_picture import draw_mesh, tasks_of_devices, title_of
from mmnnx.inspect.placement import NowhereError, show_placement
from mmnnx.inspect.rich_output import html, plain, table_bundle
from mmnnx.inspect.timeline_picture import draw_timeline
from mmnnx.inspect.units import bytes_text, ranges_text
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.sharding.division import Division
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.placement import TaskSharding


@notebook_bundle.register
def program_bundle(program: Program) -> dict[str, Any]:
    """A table of its meshes, and its timeline with unit costs."""
    timeline = program.simulate()
    table = program_table(program, timeline)
    shown = html(table)
    if timeline.by_mesh():
        figure = draw_timeline(timeline)
        picture = base64.b64encode(picture_bytes(figure, ".png")).decode()
        shown += (
            f'<img width="{round(96 * figure.get_figwidth())}" '
            f'alt="{text_to_html.escape(repr(timeline))}" src="data:image/png;base64,{picture}">'
        )
    return {"text/plain": plain(table), "text/html": shown}


def program_table(program: Program, timeline: Timeline) -> Table:
    """A row for each mesh: its devices, what it runs and receives, and what it holds at most."""
    calls = Counter(program.names[call.mesh] for call in program.calls)
    fragments = Counter(program.names[fragment.mesh] for fragment in program.fragments)
    received, arrays = Counter[str](), Counter[str]()
    for t in program.transfers:
        received[t.target] += t.nbytes
        arrays[t.target] += 1
    table = Table(title=Text(repr(program)), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("mesh", "axes", "devices"):
        table.add_column(heading, overflow="fold")
    for heading in ("fragments", "calls", "received", "peak bytes", "saved activations"):
        table.add_column(heading, justify="right")
    used = {mesh for _, mesh in program.values}
    for mesh, name in program.names.items():
        if mesh not in used:
            continue
        table.add_row(
            cell(name),
            cell(", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())),
            ranges_text(device.id for device in mesh.devices.flat),
            str(fragments[name]),
            str(calls[name]),
            f"{arrays[name]} {'array' if arrays[name] == 1 else 'arrays'}, {bytes_text(received[name])}",
            bytes_text(timeline.peak_bytes.get(name, 0)),
            bytes_text(timeline.residual_bytes.get(name, 0)),
        )
    if program.notes:
        table.caption = Text("\n".join(f"note: {note}" for note in program.notes))
    return table


@notebook_bundle.register
def mesh_bundle(mesh: MultiMesh) -> Any:
    """A picture of its devices by axis; as text its axes, and the tasks that have state on it."""
    devices: dict[str, list[int]] = {}
    for device, tasks in tasks_of_devices(mesh).items():
        devices.setdefault(tasks, []).append(device.id)
    lines = [title_of(mesh), *(f"{tasks}: {ranges_text(ids)}" for tasks, ids in devices.items())]
    return picture_bundle(draw_mesh(mesh), "\n".join(lines))


@notebook_bundle.register
def sharding_bundle(sharding: TaskSharding) -> dict[str, Any]:
    """A table of its rules."""
    return table_bundle(sharding_table(sharding))


def sharding_table(sharding: TaskSharding) -> Table:
    """A row for each rule of a TaskSharding, in order: the first that matches decides."""
    table = Table(title="TaskSharding", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("", "filter", "task", "mesh", "spec"):
        table.add_column(heading, overflow="fold")
    for number, (filter, (task, spec)) in enumerate(zip(sharding.filters, sharding.rules, strict=True)):
        tasks = task.tasks if isinstance(task, Division) else (task,)
        table.add_row(
            str(number),
            cell("..." if filter is ... else repr(filter)),
            cell(", ".join(str(one.name) for one in tasks)),
            cell("\n".join(dict.fromkeys(one.mesh_text for one in tasks))),
            cell("its logical axes" if spec is None else spec_text(spec)),
        )
    return table


def load_ipython_extension(ipython: Any) -> None:
    """Makes a notebook show each placed model as the picture that `mm.show_placement` draws.

    `%load_ext mmnnx` calls it. A Module whose arrays are on no device is shown as Flax shows it, as all are
    without the extension.

    Args:
      ipython: the IPython shell.

    Example:
      >>> from IPython import get_ipython
      >>> if get_ipython() is not None:
      ...     mm.load_ipython_extension(get_ipython())
    """
    ipython.display_formatter.mimebundle_formatter.for_type(nnx.Module, _model_bundle)


def _model_bundle(model: nnx.Module, include: Any = None, exclude: Any = None) -> Any:
    try:
        return show_placement(model)._repr_mimebundle_(include, exclude)
    except NowhereError:  # it is shown as without us
        return None
