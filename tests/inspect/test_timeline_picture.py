"""Pictures of timelines, looked at through what matplotlib was told to draw."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex

import mmnnx as mm
from mmnnx.inspect import draw_timeline
from mmnnx.inspect.colours import text_colour
from mmnnx.inspect.figure_style import DARK, LIGHT
from mmnnx.inspect.phase_styles import STYLES, phase_colour
from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Event, Timeline
from tests.slow import few


def event(
    mesh: str, start: float, end: float, phase: str, microbatch: int | None = None, stage=None
) -> Event:
    return Event(mesh, start, end, phase, microbatch, "fragment", stage)


def pipeline(name: str, meshes: int, microbatches: int) -> Timeline:
    return by_name(name, meshes, microbatches, 2, UNIT_COSTS).timeline


def collections(figure) -> dict[str, PolyCollection]:
    return {c.get_label(): c for c in figure.axes[0].collections if isinstance(c, PolyCollection)}


def boxes(figure) -> list[tuple[str, float, float, int]]:
    """(phase, start, end, row) of every box drawn."""
    extents = [(phase, p.get_extents()) for phase, c in collections(figure).items() for p in c.get_paths()]
    return sorted((phase, round(x.x0, 6), round(x.x1, 6), round((x.y0 + x.y1) / 2)) for phase, x in extents)


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def busy(figure) -> list[str]:
    (right,) = figure.axes[0].child_axes
    return [label.get_text() for label in right.get_yticklabels()]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


def test_every_event_is_a_box_where_and_when_it_ran():
    timeline = pipeline("zbv", 3, 6)
    ran = sorted((e.phase, e.start, e.end, int(e.mesh[-1])) for e in timeline.events)
    assert boxes(draw_timeline(timeline)) == ran


def test_what_takes_no_time_is_not_drawn():
    timeline = Timeline((event("a", 0, 1, "forward", 0), event("a", 1, 1, "none"), event("b", 1, 1, "none")))
    figure = draw_timeline(timeline)
    assert boxes(figure) == [("forward", 0, 1, 0)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a"]
    assert "other work" not in legend(figure)


def test_rows_are_named_after_meshes_from_the_top():
    axes = draw_timeline(pipeline("1f1b", 4, 8)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mesh0", "mesh1", "mesh2", "mesh3"]
    bottom, top = axes.get_ylim()
    assert bottom > top


def test_rows_follow_the_pipeline_not_the_order_of_the_events():
    events = [*reversed(pipeline("gpipe", 3, 2).events), event("mesh2", -1, 0, "none")]
    axes = draw_timeline(Timeline(tuple(events))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mesh0", "mesh1", "mesh2"]


def test_phases_and_stages_have_colours_of_their_own():
    figure = draw_timeline(pipeline("zbv", 2, 4))
    colours = {phase: set(map(tuple, c.get_facecolors())) for phase, c in collections(figure).items()}
    assert set(colours) == {"forward", "backward-input", "backward-weight"}
    assert [len(shades) for shades in colours.values()] == [2, 2, 2]
    assert len(set.union(*colours.values())) == 6
    assert "lighter: a later stage of the mesh" in legend(figure)
    assert "lighter: a later stage of the mesh" not in legend(draw_timeline(pipeline("1f1b", 2, 4)))


def linear(colour: str) -> np.ndarray:
    """Linear RGB of "#rrggbb"."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ rgb / [0.9505, 1, 1.089], 1e-3))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency".
COLOUR_BLIND = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def test_phases_differ_in_greyscale():
    """Whatever the stages, no colour of one phase is as light as one of another, or as the background."""
    phases = ["none", "forward", "backward", "backward-input", "backward-weight"]
    light = [(lab(linear(STYLES[p].dark))[0], lab(linear(STYLES[p].light))[0]) for p in phases] + [(100, 100)]
    assert all(after[0] - before[1] > 5 for before, after in itertools.pairwise(light))


@pytest.mark.parametrize("kind", COLOUR_BLIND)
def test_phases_differ_for_the_colour_blind(kind):
    seen = {
        (phase, nth): lab(np.clip(np.array(COLOUR_BLIND[kind]) @ linear(phase_colour(phase, nth, 2)), 0, 1))
        for phase in STYLES
        if phase != "transfer"
        for nth in range(2)
    }
    for one, other in itertools.combinations(seen, 2):
        assert one[0] == other[0] or math.dist(seen[one], seen[other]) > 12, (one, other)


def test_numbers_are_legible_on_their_boxes():
    for phase, nth in itertools.product(STYLES, range(2)):
        paper = phase_colour(phase, nth, 2)
        luminance = sorted(
            float(np.dot([0.2126, 0.7152, 0.0722], linear(c))) for c in (paper, text_colour(paper))
        )
        assert (luminance[1] + 0.05) / (luminance[0] + 0.05) > 3  # WCAG's ratio, for large text


def test_the_bubble_is_that_of_the_timeline():
    half = Timeline((event("a", 0, 4, "forward", 0), event("b", 4, 4.5, "forward", 0)))
    assert half.bubble == pytest.approx(1 - 4.5 / 8)
    figure = draw_timeline(half)
    assert "bubble" in legend(figure)
    assert figure.axes[0].get_title(loc="left") == "bubble 43.8%, steady-state step time 4 units"
    assert busy(figure) == ["100% busy", "12% busy"]
    shared = dataclasses.replace(half, mesh_devices={"a": [("cpu", 0)], "b": [("cpu", 0)]})
    assert "bubble, or another mesh of the same devices" in legend(draw_timeline(shared))


def test_the_title_has_the_schedule():
    title = lambda **options: draw_timeline(pipeline("1f1b", 2, 4), **options).axes[0].get_title(loc="left")
    assert title() == "1f1b, bubble 20.0%, steady-state step time 15 units"
    assert title(title="mine") == "mine: 1f1b, bubble 20.0%, steady-state step time 15 units"


def test_transfers_are_arrows_between_the_rows():
    boxes = (event("a", 0, 1, "forward", 0), event("b", 2, 3, "forward", 0), event("c", 2, 3, "forward"))
    sent = (event("a -> b", 1, 2, "transfer", 0), event("a -> b", 1, 2, "transfer", 0))
    back = event("c -> a", 3, 3.5, "transfer"), event("c -> elsewhere", 3, 4, "transfer")
    figure = draw_timeline(Timeline(boxes, (*sent, *back)))
    (lines,) = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    ends = [[(x, round(y)) for x, y in path.vertices] for path in lines.get_paths()]
    assert ends == [[(1, 0), (2, 1)], [(3, 2), (3.5, 0)]]  # what is sent together is one
    assert "transfer" in legend(figure) and "transfer" not in legend(draw_timeline(Timeline(boxes)))


def test_bytes_over_time_are_those_that_simulate_says():
    """Two tasks: a matrix of 64 bytes comes in, is squared, sent on, and squared again."""
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    first, second = (mm.task(lambda x: x @ x, f"t{n}", mesh_slice={"stage": n}) for n in range(2))
    program = mm.jit(lambda x: second(first(x)), mesh=mesh).program(jnp.ones((4, 4)))
    timeline = program.simulate({"none": 1.0, "forward": 1.0})
    assert timeline.held_bytes == {"t0": ((0.0, 128), (1.0, 0)), "t1": ((1.0, 64),)}
    assert timeline.peak_bytes == {"t0": 128, "t1": 64}  # the last square takes the place of what it squares
    below = draw_timeline(timeline).axes[1]
    assert below.get_ylabel() == "bytes of arrays\nof each mesh"
    for line, (name, held) in zip(below.lines, timeline.held_bytes.items(), strict=True):
        assert line.get_label() == f"{name}: peak {timeline.peak_bytes[name]} B"
        assert list(zip(*line.get_data()))[:-1] == list(held)
        assert line.get_drawstyle() == "steps-post"


@pytest.mark.parametrize("unit, at", [("units", [0, 2.04, 2.08]), ("s", [0, 2, 2])])
def test_a_peak_of_what_takes_no_time_is_seen(unit, at):
    """An optimizer takes none in a simulation: its bytes have a little room behind the last event."""
    held = {"a": ((0.0, 10), (2.0, 30), (2.0, 20))}
    timeline = Timeline((event("a", 0, 2, "forward", 0),), unit=unit, held_bytes=held)
    above, below = draw_timeline(timeline).axes[:2]
    (line,) = below.lines
    assert list(line.get_xdata())[:3] == pytest.approx(at) and list(line.get_ydata())[1] == 30
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, at[-1]))
    assert ("takes none" in below.get_xlabel()) == (unit == "units")


@pytest.mark.parametrize("dark", [False, True])
def test_names_are_drawn_as_they_are_on_either_paper(dark):
    figure = draw_timeline(Timeline((event("$a$_b", 0, 1, "forward", 0),)), title="$x", dark=dark)
    settle(figure)  # $a$_b is no formula
    assert figure.axes[0].get_yticklabels()[0].get_text() == "$a$_b"
    paper, ink = (figure.get_facecolor(), figure.axes[0].get_yticklabels()[0].get_color())
    assert (sum(paper[:3]) < 1) == dark and to_hex(ink) == (DARK if dark else LIGHT).ink


def test_what_is_outside_of_derivatives_is_other_work():
    timeline = Timeline((event("a", 0, 1, "forward", 0), event("a", 1, 2, "none")))
    assert legend(draw_timeline(timeline))[:2] == ["forward", "other work"]


def test_every_microbatch_number_is_legible_at_4x8():
    figure = draw_timeline(pipeline("1f1b", 4, 8))
    assert sorted(labels(figure)) == sorted(str(m) for m in range(8) for _ in range(2 * 4))
    settle(figure)
    axes = figure.axes[0]
    for text in axes.texts:
        assert text.get_fontsize() >= 6
        box = text.get_window_extent()
        room = next(
            p.get_extents().transformed(axes.transData)
            for c in axes.collections
            for p in c.get_paths()
            if p.contains_point(text.get_position())
        )
        assert room.x0 < box.x0 and box.x1 < room.x1  # inside its box


@few(1)
@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_a_large_pipeline_fits_a_notebook_and_its_boxes_are_seen(name):
    figure = draw_timeline(pipeline(name, 16, 64))
    width, height = figure.get_size_inches()
    assert width <= 16 and height <= 10
    settle(figure)
    shortest = min(end - start for _, start, end, _ in boxes(figure))
    (x0, _), (x1, _) = figure.axes[0].transData.transform([(0, 0), (shortest, 0)])
    assert x1 - x0 > 3  # pixels
    for text in figure.axes[0].texts:
        assert text.get_fontsize() >= 5


def settle(figure) -> None:
    """Lays the figure out."""
    figure.draw(FigureCanvasAgg(figure).get_renderer())


def test_names_of_many_meshes_do_not_overlap():
    figure = draw_timeline(pipeline("gpipe", 100, 2))
    settle(figure)
    names = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(names) >= 40
    assert all(above.y0 >= below.y1 - 1 for above, below in itertools.pairwise(names))


def test_times_need_not_start_at_zero_and_are_in_handy_units():
    measured = Timeline(
        (event("a", 100.0, 100.001, "forward", 0), event("a", 100.001, 100.003, "backward", 0)), unit="s"
    )
    axes = draw_timeline(measured, title="a run").axes[0]
    assert axes.get_xlim() == pytest.approx((0, 3))
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_title(loc="left") == "a run: bubble 0.0%, steady-state step time 3 ms"


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline(Timeline(()))
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline(Timeline((event("a", 0, 0, "none"),)))
