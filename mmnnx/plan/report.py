"""A plan as text: the verdict, what is in memory, what each fragment needs, and what bounds the time."""

from __future__ import annotations

import base64
import html
import io
import re
from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmnnx.inspect.cells import cell
from mmnnx.inspect.figure_bytes import picture_bytes
from mmnnx.inspect.rich_output import print_table
from mmnnx.inspect.units import bytes_text, time_text
from mmnnx.plan.fragments import FragmentCost
from mmnnx.plan.memory import KINDS, DeviceMemory
from mmnnx.plan.picture import draw_plan
from mmnnx.plan.step_plan import Overflow, StepPlan

WIDTH = 140  # columns, where there is no terminal
MOST = 8  # collectives, arrays inside fragments, and notes


def report(plan: StepPlan) -> RenderableType:
    """The whole report, for rich."""
    parts: list[RenderableType] = [*_head(plan), ""]
    if plan.overflow is not None:
        parts += _overflow(plan.overflow)
    else:
        parts += [_memory(plan), _fragments(plan)]
        parts += [table for table in (_collectives(plan.fragments), _values(plan.fragments)) if table]
        parts += _advice(plan)
    parts += [cell(f"note: {note}") for note in plan.notes[:MOST]]
    if (others := len(plan.notes) - MOST) > 0:
        parts.append(f"and {others} more: the plan's notes have them all")
    return Group(*parts)


def as_text(plan: StepPlan) -> str:
    """The report without colours."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, force_jupyter=False, highlight=False)
    print_table(console, report(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(plan: StepPlan) -> str:
    """A page with the report and the picture."""
    parts = [f"<pre>{html.escape(as_text(plan))}</pre>"]
    if plan.memory:
        picture = base64.b64encode(picture_bytes(draw_plan(plan), ".png")).decode()
        parts.insert(0, f'<img alt="memory and time" src="data:image/png;base64,{picture}">')
    title = html.escape(f"{plan.name} on {plan.devices} x {plan.device_kind}")
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def verdict(plan: StepPlan) -> Text:
    """Whether it fits, in one line."""
    line = cell(f"{plan.name} on {plan.devices} x {plan.device_kind}: ", "bold")
    if plan.fits is not None:
        line.append("it fits" if plan.fits else "it does not fit", style="green" if plan.fits else "red")
    elif plan.chip is None:
        line.append("no figures of such devices are known")
    return line


def _head(plan: StepPlan) -> list[RenderableType]:
    line = verdict(plan)
    lines: list[RenderableType] = [line]
    if plan.seconds and plan.timeline is not None and plan.chip is not None:
        lines.append(
            f"step {time_text(plan.seconds)} (at best {time_text(plan.fastest or 0.0)}), bubble "
            f"{plan.timeline.bubble:.1%}, {plan.utilization or 0.0:.1%} of the devices' matrix FLOP/s "
            "(recomputation counted)"
        )
        lines.append(
            "estimated, not measured: fragments by a roofline, the step by the schedule's simulation"
        )
    return lines


def _memory(plan: StepPlan) -> Table:
    table = Table(title="bytes on each device at its worst moment", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("devices of")
    kinds = [kind for kind in KINDS if any(m.peak_of.get(kind) for m in plan.memory)]
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("sum", justify="right")
    if plan.chip is not None:
        table.add_column(f"of {bytes_text(plan.chip.memory)}", justify="right")
    table.add_column("while it runs")
    for names, members in _alike(plan.memory):
        m = members[0]
        cells = [bytes_text(n) if (n := m.at_peak.get(kind, 0)) else "-" for kind in kinds]
        share = []
        if plan.chip is not None:
            over = m.total > plan.chip.memory
            share = [Text(f"{m.total / plan.chip.memory:.0%}", style="red" if over else "green")]
        # Of one of the stages in the row; of a number alone nobody knows what it counts.
        moment = re.sub(rf"(?<!\S){re.escape(m.meshes[0])} (?!\()", "", m.moment)
        table.add_row(cell(names), *cells, bytes_text(m.total), *share, cell(moment))
    return table


def _alike(memory: Iterable[DeviceMemory]) -> list[tuple[str, list[DeviceMemory]]]:
    """Neighbours that hold the same but for the number of saved activations stay apart; equal ones do not."""
    rows: list[tuple[list[DeviceMemory], object]] = []
    for m in memory:
        key = (dict(m.at_peak), m.devices)
        if rows and rows[-1][1] == key:
            rows[-1][0].append(m)
        else:
            rows.append(([m], key))
    named = []
    for members, _ in rows:
        first, last = (", ".join(m.meshes) for m in (members[0], members[-1]))
        named.append((first if len(members) == 1 else f"{first} .. {last}", members))
    return named


def _fragments(plan: StepPlan) -> Table:
    table = Table(
        title="one run of each distinct fragment, on each device", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("fragment", overflow="fold")
    for heading in ("runs", "arguments", "new results", "temporaries", "GFLOP", "sent"):
        table.add_column(heading, justify="right")
    if plan.chip is not None:
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("bound by", no_wrap=True)
    alike = Counter(f.alike for f in plan.fragments)
    for f in plan.fragments:
        if f.alike != f.name:
            continue
        others = f" and {alike[f.name] - 1} alike" if alike[f.name] > 1 else ""
        sizes = (f.argument_bytes, f.output_bytes - f.alias_bytes, f.temporary_bytes)
        sent = "?" if f.collectives is None else bytes_text(round(f.sent)) if f.sent else "-"
        times = [] if plan.chip is None else [time_text(f.seconds(plan.chip)), f.bound(plan.chip)]
        flops = f"{sum(f.flops.values()) / 1e9:,.4g}"
        table.add_row(cell(f.name + others), str(f.runs), *map(bytes_text, sizes), flops, sent, *times)
    return table


def _collectives(fragments: Iterable[FragmentCost]) -> Table | None:
    found = [(c, f.name) for f in fragments if f.alike == f.name for c in f.collectives or ()]
    if not found:
        return None
    table = Table(title="what devices of a mesh send each other", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("fragment", "collective", "along", "devices", "times", "bytes"):
        table.add_column(heading, overflow="fold")
    for c, name in sorted(found, key=lambda pair: -pair[0].sent)[:MOST]:
        row = (c.kind, cell("/".join(c.axes)), str(c.devices), str(c.count), bytes_text(c.nbytes))
        table.add_row(cell(name), *row)
    return table


def _values(fragments: Iterable[FragmentCost]) -> Table | None:
    found = [(v, f.name) for f in fragments if f.alike == f.name for v in f.values]
    if not found:
        return None
    table = Table(title="the largest arrays inside fragments", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("fragment", "array", "bytes", "times", "made by"):
        table.add_column(heading, overflow="fold")
    for value, name in sorted(found, key=lambda pair: -pair[0].nbytes)[:MOST]:
        shape, made_by = cell(value.shape), cell(value.name)
        table.add_row(cell(name), shape, bytes_text(value.nbytes), str(value.count), made_by)
    return table


def _overflow(overflow: Overflow) -> list[RenderableType]:
    over = overflow.needed - overflow.limit
    lines: list[RenderableType] = [
        cell(
            f"{overflow.fragment} needs {bytes_text(overflow.needed)} of each device, "
            f"{bytes_text(over)} more than the {bytes_text(overflow.limit)} that it has. "
            "The largest arrays that it makes, over all devices of its mesh:"
        )
    ]
    lines += [cell(f"  {bytes_text(nbytes):>9}  {what}") for nbytes, what in overflow.largest[:MOST]]
    return [*lines, HELP]


HELP = (
    "What helps: fewer rows in a microbatch, remat (LMConfig(remat=True), nnx.remat), more stages, more "
    "devices in a stage; for logits and attention scores, LMConfig(loss_chunks=8, attention_chunks=8)"
)


def _advice(plan: StepPlan) -> list[RenderableType]:
    """What does not fit, and what would help."""
    if plan.chip is None or plan.fits:
        return []
    lines: list[RenderableType] = [""]
    for m in plan.memory:
        if (over := m.total - plan.chip.memory) > 0:
            largest = sorted(m.at_peak, key=lambda kind: -m.at_peak[kind])[:2]
            what = " and ".join(f"{bytes_text(m.at_peak[kind])} of {kind}" for kind in largest)
            names = ", ".join(m.meshes)
            lines.append(cell(f"{names}: {bytes_text(over)} too much while {m.moment} runs, with {what}"))
    return [*lines, HELP]
