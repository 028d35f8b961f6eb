"""Timelines as text."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from rich.style import Style

import mmnnx as mm
from mmnnx.inspect import draw_text, timeline
from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Event, Timeline
from tests.slow import all_but


def pipeline(name: str, meshes: int, microbatches: int) -> Timeline:
    return by_name(name, meshes, microbatches, 2, UNIT_COSTS).timeline


def test_1f1b_written_out():
    assert str(timeline(pipeline("1f1b", 2, 3), title="1f1b")).split("\n") == [
        "1f1b",
        "mesh0 F0F1    B0--F2B1--  B2--",
        "mesh1   F0B0--F1B1--F2B2--",
        "F forward  B backward  blank: bubble, 25.0%; steady-state step time 12 units",
    ]


def test_stages_of_a_mesh_and_parts_of_a_backward_written_out():
    assert draw_text(pipeline("zbv", 2, 3), width=70).plain.split("\n") == [
        "mesh0 F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2",
        "mesh1   F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2",
        "F forward  I backward-input  W backward-weight",
        "small: every other stage of a mesh",
        "blank: bubble, 0.0%; steady-state step time 9 units",
    ]


def test_the_legend_of_a_narrow_terminal():
    assert draw_text(pipeline("zbv", 2, 3), width=40).plain.split("\n")[2:] == [
        "F forward  I backward-input",
        "W backward-weight",
        "small: every other stage of a mesh",
        "blank: bubble, 0.0%; steady-state step",
        "time 9 units",
    ]


def test_meshes_of_the_same_devices():
    """A row is blank too while the other mesh runs."""
    rows = Event("a", 0, 2, "forward", 0, "f"), Event("b", 2, 4, "forward", 0, "f")
    legend = lambda **devices: draw_text(Timeline(rows, mesh_devices=devices)).plain.split("\n")[-1]
    assert "blank: bubble, 0.0%; " in legend(a=[("cpu", 0)], b=[("cpu", 1)])
    assert "blank: bubble, 0.0%, or another mesh of the same devices; " in legend(
        a=[("cpu", 0)], b=[("cpu", 0)]
    )


SIZES, WIDTHS = [(4, 8), (4, 12), (16, 64)], [60, 80, 120, 250]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble-h2", "zbv", "dualpipe-v"])
@pytest.mark.parametrize(
    "size, width",
    all_but([(size, 80) for size in SIZES] + [((4, 8), 60), ((16, 64), 250)], product(SIZES, WIDTHS)),
)
def test_lines_fit_and_each_phase_has_its_share(name, size, width):
    simulated = pipeline(name, *size)
    lines = draw_text(simulated, width=width).plain.split("\n")
    assert max(map(len, lines)) <= width
    assert len([line for line in lines if line.startswith("mesh")]) == size[0]
    seen: Counter[str] = Counter()
    for line in lines[: size[0]]:
        assert line.startswith("mesh")
        letter = " "
        for cell in line[7:].rstrip():  # a number or a dash belongs to the letter before it
            letter = cell.upper() if cell.isalpha() or cell == " " else letter
            seen[letter] += 1
    times: Counter[str] = Counter()
    for e in simulated.events:
        times[{"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}[e.phase]] += (
            e.end - e.start
        )
    del seen[" "]
    for letter, time in times.items():
        assert seen[letter] / seen.total() == pytest.approx(time / times.total(), abs=0.05)


def test_microbatches_are_numbered_where_there_is_room():
    plain = draw_text(pipeline("1f1b", 2, 12), width=124).plain
    for m in range(12):
        assert len(re.findall(rf"[FB]{m}(?!\d)", plain)) == 4
    assert draw_text(pipeline("1f1b", 2, 12), width=50).plain.split("\n")[:2] == [
        "mesh0 FF  B0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB- B-",
        "mesh1  FB0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-FB-",
    ]


def test_measured_times():
    """Boxes of any length: each begins and ends at the nearest column."""
    events = [
        Event("a", 5.0, 5.0103, "forward", 0, "f", 0),
        Event("a", 5.0103, 5.0104, "none", None, "g"),  # too short to be seen
        Event("a", 5.0213, 5.0410, "backward", 0, "b", 0),
    ]
    lines = draw_text(Timeline(tuple(events), unit="s"), width=50).plain.split("\n")
    assert lines[0] == "a F0----------             B0---------------------"
    assert lines[-1].endswith("steady-state step time 41 ms")


def test_coloured_by_phase_where_there_are_colours():
    view = timeline(pipeline("zbv", 2, 3))

    def show(**options) -> str:
        console = Console(width=80, **options)
        with console.capture() as capture:
            console.print(view)
        return capture.get()

    plain, coloured = show(color_system=None), show(force_terminal=True, color_system="truecolor")
    text = draw_text(view.timeline, title="zbv", width=80)
    assert plain.rstrip("\n") == text.plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain != coloured
    # Not of the codes: rich keeps those of a style as the first console had them.
    backgrounds = {Style.parse(str(span.style)).bgcolor for span in text.spans} - {None}
    assert len(backgrounds) == 6  # three phases of two stages


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_text(Timeline(()))


def test_a_step_without_a_loop_shows_every_fragment():
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",))
    first, second = (mm.task(lambda x: jnp.tanh(x), f"t{n}", mesh_slice={"stage": n}) for n in range(2))
    program = mm.jit(jax.grad(lambda x: second(first(x)).sum()), mesh=mesh).program(jnp.ones(4))
    lines = str(timeline(program)).split("\n")
    assert ["F" in line and "B" in line for line in lines[:2]] == [True, True], lines
