"""What was measured, as Markdown and as a picture."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from mmnnx.inspect.figure_style import TEXT, WIDTH, settle_ticks, styled

COLORS = {False: ("#005998", "#b9c6d3"), True: ("#56a8e8", "#4b5866")}  # by dark: of mm.jit, of its peers


def markdown(summary: dict[str, Any]) -> str:
    """A table for each problem, one of what bounds mm.jit, and notes where another one is faster."""
    stages, microbatches = summary["stages"], summary["microbatches"]
    bound = microbatches * stages / (microbatches + stages - 1)
    lines = [
        "# Side by side",
        "",
        f"{summary['machine']}; {summary['versions']}",
        "",
        f"One training step (AdamW, {microbatches} microbatches) of {stages} one-device stages, or on the "
        f"same {stages} devices, in one process; {summary['rounds']} rounds. Losses and gradients agree.",
        "",
        "- *time*: median of the rounds, until all that the step writes is ready;",
        "- *x mm.jit*: the time over that of mm.jit, median of the ratios within a round (above 1: slower);",
        "- *speed-up*: over one device, likewise. A 1F1B pipeline whose stages have a device each to "
        f"themselves allows {bound:.2f};",
        "- *cores*: how many were busy at a time. A CPU device is no core: XLA spreads larger operations of "
        "one device over all of them;",
        "- *CPU*: time of all cores together; *dispatch*: CPU time of the Python thread in the call;",
        "- *first step*: tracing and compiling (*XLA programs*) too.",
    ]
    for name, problem in summary["problems"].items():
        lines += ["", f"## {name}", "", *_table(problem["rows"])]
    lines += ["", "## What bounds mm.jit", "", *_bounds(summary)]
    notes = [note for name, problem in summary["problems"].items() for note in _notes(name, problem, summary)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _table(rows: dict[str, Any]) -> list[str]:
    return [
        "| | time | x mm.jit | speed-up | cores | CPU | dispatch | XLA programs | first step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {r['median_ms']:.1f} ms | {r['over_mm_jit']:.2f} | {r['speedup']:.2f} "
            f"| {r['cores_busy']:.1f} | {r['cpu_ms']:.0f} ms | {r['host_cpu_ms']:.1f} ms "
            f"| {r['xla_programs']} | {r['first_step_s']:.1f} s |"
            for name, r in rows.items()
        ),
    ]


def bounds(problem: dict[str, Any], cores: int) -> dict[str, float]:
    """What a step of mm.jit cannot be faster than, in milliseconds, by what takes the time."""
    row = problem["rows"]["mm.jit"]
    return {
        "dispatch": row["host_cpu_ms"],
        "CPU time over cores": row["cpu_ms"] / cores,
        "the pipeline": problem["program"]["simulated_ms"],
    }


def _bounds(summary: dict[str, Any]) -> list[str]:
    lines = [
        "A step is no shorter than the CPU time of the thread that dispatches it, than all its CPU time over "
        f"the {summary['cores']} cores, or than its pipeline: fragments, each timed alone with all cores and "
        "caches to itself, and simulated in the order of the schedule.",
        "",
        "| | step | dispatch | CPU time over cores | the pipeline | longest over step | bubble "
        "| fragments | instructions | transfers |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, problem in summary["problems"].items():
        step, p = problem["rows"]["mm.jit"]["median_ms"], problem["program"]
        found = bounds(problem, summary["cores"])
        lines.append(
            f"| {name} | {step:.1f} ms | "
            + " | ".join(f"{ms:.1f} ms" for ms in found.values())
            + f" | {max(found.values()) / step:.0%} | {p['bubble']:.0%} | {p['fragments']} "
            f"| {p['instructions']} | {p['transfers']}, {p['transferred_kib']:.0f} KiB |"
        )
    return lines


def _notes(name: str, problem: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Why another contender is faster, from the times."""
    rows, p = problem["rows"], problem["program"]
    mm = rows["mm.jit"]
    fastest = min(rows, key=lambda contender: rows[contender]["over_mm_jit"])
    if fastest == "mm.jit":
        return []
    other = rows[fastest]
    found = bounds(problem, summary["cores"])
    why = {
        "dispatch": f"mm.jit dispatches {p['instructions']} instructions from Python, which takes "
        f"{mm['host_cpu_ms']:.1f} ms of its {mm['median_ms']:.1f}; {fastest}, {other['host_cpu_ms']:.1f} ms",
        "CPU time over cores": f"mm.jit keeps {mm['cores_busy']:.1f} of {summary['cores']} cores busy, and "
        f"needs {mm['cpu_ms']:.0f} ms of CPU time; {fastest}, {other['cpu_ms']:.0f} ms",
        "the pipeline": f"in mm.jit's order devices have nothing to do for {p['bubble']:.0%} of the time "
        f"({p['schedule_bubble']:.0%} if all stages took equally long)",
    }
    return [
        f"- {name}: {fastest} takes {other['over_mm_jit']:.2f} of its time: " + why[max(found, key=found.get)]
    ]


def draw(summary: dict[str, Any], dark: bool = False) -> Figure:
    """What each gets through in a second: a row of panels for each model, one of them for each size.

    That is mm.jit's median, over the ratio of their times within a round, as the table has it.
    """
    models: dict[str, dict[str, Any]] = {}
    for name, problem in summary["problems"].items():
        model, size = name.split(", ")
        models.setdefault(model, {})[size] = problem
    columns = max(map(len, models.values()))
    color, of_peers = COLORS[dark]
    with styled(dark) as look:
        figure = Figure(figsize=(WIDTH, 0.55 + 1.55 * len(models)), layout="constrained")
        panels = figure.subplots(len(models), columns, squeeze=False)
        for line, (model, sizes) in zip(panels, models.items()):
            for panel, (size, problem) in zip(line, sizes.items()):
                names = list(problem["rows"])
                ours = 1e3 * problem["items"] / problem["rows"]["mm.jit"]["median_ms"]
                speeds = [ours / row["over_mm_jit"] for row in problem["rows"].values()]
                bars = panel.barh(
                    names,
                    speeds,
                    color=[color if name == "mm.jit" else of_peers for name in names],
                    height=0.76,
                )
                panel.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
                panel.set_title(f"{model}, {size}: {problem['unit']}/s")
                panel.set(xlim=(0, 1.3 * max(speeds)), xticks=[])
                panel.invert_yaxis()
                panel.spines[:].set_visible(False)
                settle_ticks(panel, look)
                panel.tick_params(length=0, labelcolor=look.ink, labelleft=panel is line[0])
        figure.suptitle(
            f"A training step on {summary['stages']} devices of one process, medians of "
            f"{summary['rounds']} rounds\n{summary['machine']}; {summary['versions']}",
            fontsize=TEXT,
            color=look.faint,
            x=0.01,
            ha="left",
        )
    return figure
