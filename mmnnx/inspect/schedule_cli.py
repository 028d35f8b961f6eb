"""The command ``mmnnx schedule``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from mmnnx.inspect.cells import cell
from mmnnx.inspect.rich_output import print_table, table_console
from mmnnx.inspect.schedules import Simulated, by_name, from_csv
from mmnnx.inspect.timeline import TimelineView, check_suffix
from mmnnx.mpmd.schedule import schedule_names, write_schedule
from mmnnx.options import optional, parse_options, reported
from mmnnx.output import current

FILE_WIDTH = 120  # columns of output to a file or a pipe


@dataclass(frozen=True)
class ScheduleConfig:
    """Compare pipeline schedules: simulated step time, bubble and saved activations. Needs no devices.

    Prints a table of all schedules, sorted by steady-state step time, and draws the first; or only the one
    that is chosen. Saved activations are what a forward keeps for its backward.
    """

    stages: Annotated[int | None, optional("INT", "4")] = None
    """Meshes that the model is partitioned over, whatever the number of stages on each. A CSV has its own."""
    microbatches: Annotated[int | None, optional("INT", "8")] = None
    """Microbatches that the batch is divided into. A CSV has its own."""
    schedule: Annotated[str | None, optional("NAME|FILE.csv", "all")] = None
    """The schedule to show: a name from the table, or a CSV file with a row for each mesh (see --csv)."""
    all: bool = False
    """Draw every schedule."""
    interleave: int = 2
    """Stages on each mesh for schedules with looped placement. (Those with V-shaped placement have two.)"""
    forward: float = 1.0
    """Time that a mesh takes for the forwards of all its stages, for one microbatch."""
    backward_input: float = 1.0
    """The same for the gradients of inputs (backward-input)."""
    backward_weight: float = 1.0
    """The same for the gradients of weights (backward-weight)."""
    csv: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write the schedule that is drawn to, as CSV."""
    save: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write its timeline to: .svg, .png or .pdf for the picture, .json for a trace for Perfetto."""

    def validate(self) -> None:
        """Raises ValueError for options that make no sense."""
        for name in ("stages", "microbatches", "interleave"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        for name in ("forward", "backward_input", "backward_weight"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"--{name.replace('_', '-')} {value:g} must be a time")
        if not self.forward + self.backward_input + self.backward_weight:
            raise ValueError("nothing takes time: give --forward or a --backward- time above 0")
        if self.all and self.schedule:
            raise ValueError("--all draws every schedule, --schedule one: give one of them")
        for option, path in (("--csv", self.csv), ("--save", self.save)):
            if self.all and path:
                raise ValueError(f"{option} writes one schedule: choose it with --schedule instead of --all")
        if self.save:
            check_suffix(self.save)

    @property
    def costs(self) -> Mapping[str, float]:
        """Time for each phase; a whole backward takes the time of both parts."""
        return {
            "forward": self.forward,
            "backward": self.backward_input + self.backward_weight,
            "backward-input": self.backward_input,
            "backward-weight": self.backward_weight,
        }


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx schedule`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0; 2 for a mistake in the options. Raises SystemExit for options that cannot be
    parsed.
    """
    config = parse_options(ScheduleConfig, "schedule", options)

    def action() -> int:
        config.validate()
        show(config, table_console(FILE_WIDTH))
        return 0

    return reported(action, print_error, ValueError)


def show(config: ScheduleConfig, console: Console) -> None:
    """Print the table and the drawing, and write the files.

    Raises ValueError for a schedule that does not exist, or cannot be used for these sizes, and OSError for a
    file that cannot be read or written.
    """
    meshes, microbatches = config.stages or 4, config.microbatches or 8
    refused: list[str] = []
    if config.schedule is None:
        found = []
        for name in schedule_names():
            try:
                with _progress(console, name):  # large ones take seconds
                    found.append(by_name(name, meshes, microbatches, config.interleave, config.costs))
            except ValueError as error:
                refused.append(str(error))
        found.sort(key=lambda one: one.rank)
    elif config.schedule.lower().endswith(".csv"):
        found = [from_csv(Path(config.schedule), config.stages, config.microbatches, config.costs)]
    else:
        found = [by_name(config.schedule, meshes, microbatches, config.interleave, config.costs)]

    print_table(console, make_table(found))
    for reason in refused:
        console.print(cell(reason))
    console.print(
        "step time: steady state, from one step to the next; step latency: one step on its own; bubble: "
        "share of the step time in which a mesh runs nothing; peak activations: the most saved activations "
        "on a mesh, in microbatches."
    )
    for one in found if config.all else found[:1]:
        console.print()
        console.print(TimelineView(one.timeline))
        console.print("peak activations of each mesh: " + " ".join(map(_brief, one.memory)))
    if config.csv:
        write_schedule(found[0].table, config.csv)
        console.print(f"wrote {config.csv}", markup=False, soft_wrap=True)
    if config.save:
        TimelineView(found[0].timeline).save(config.save)
        console.print(f"wrote {config.save}", markup=False, soft_wrap=True)


def _progress(console: Console, name: str) -> contextlib.AbstractContextManager[Any]:
    """Shows which schedule is simulated, or nothing with --quiet."""
    if current.get().quiet:
        return contextlib.nullcontext()
    return console.status(cell(f"simulating {name}"))


def make_table(found: Sequence[Simulated]) -> Table:
    """A row for each schedule."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages\nper mesh", "step\ntime", "step\nlatency", "bubble", "peak\nactivations"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            cell(one.name),
            str(one.stages_per_mesh),
            _brief(one.period),
            _brief(one.timeline.makespan),
            f"{one.timeline.bubble:.1%}",
            _brief(max(one.memory)),
        )
    return table


def _brief(value: float) -> str:
    """With two decimals at most: 28.5, 4.33, 1536."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
