"""Names are text wherever they are shown: no markup, no command to a terminal, no mathematics."""

from __future__ import annotations

import dataclasses
import io
import xml.etree.ElementTree as ElementTree

import jax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import P
from matplotlib.text import Text
from rich.console import Console

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.inspect.cells import cell
from mmnnx.inspect.figure_style import LONGEST_NAME
from mmnnx.inspect.locations import spec_text
from mmnnx.inspect.timeline_picture import LONGEST_TITLE
from mmnnx.mpmd.ir.timeline import Event, Timeline
from mmnnx.printable import printable, shortened
from mmnnx.train.checkpoint.contents import Contents, Piece
from mmnnx.train.checkpoint.inspect_cli import show
from mmnnx.train.progress import Display
from tests.slow import examples

MARKUP = ["[red]a[/red]", "[/]", "[link=file]a", ":smile:", "<b>&amp;", "$x^2$", r"$\frac{$"]
COMMANDS = ["\x1b[31ma", "\x1b]0;title\x07", "\x9b2J", "a\rb", "a\nb", "\u202eabc", "a\x7f"]
NAMES = [*MARKUP, *COMMANDS]


def in_colours(shown: object) -> str:
    """What rich prints of it, with the defaults of its console."""
    file = io.StringIO()
    Console(file=file, width=400, force_terminal=True, color_system="truecolor").print(shown)
    return file.getvalue()


def check(shown: str, *parts: str) -> None:
    """No character commands a terminal, and all that was to be shown is there."""
    assert shown.replace("\n", "").isprintable()
    for part in parts:
        assert part in shown


def texts(figure) -> list[str]:
    """All texts of a picture, which can be drawn."""
    assert ElementTree.fromstring(mm.inspect.figure_bytes.picture_bytes(figure, ".svg")).tag.endswith("svg")
    return [text.get_text() for text in figure.findobj(Text)]


@dataclasses.dataclass
class Named:
    table: mm.ModelTable
    view: mm.PlacementView


@pytest.fixture(scope="module")
def named() -> Named:
    """A model whose parts, types and Variables have such names, as have tasks and axes, where they may."""
    model = type("[red]Model\x1b[0m", (nnx.Module,), {})()
    kind = type("[b]Kind\x1b[0m", (nnx.Param,), {})
    for name in NAMES:
        setattr(model, name, nnx.Dict({name: kind(jax.numpy.ones(4))}))
    axes = ("stage", *MARKUP)
    mesh = mm.MultiMesh(axis_sizes=(4, 2, *[1] * len(MARKUP[1:])), axis_names=axes)
    tasks = [mm.Task(name, mesh_slice={"stage": n % 4}) for n, name in enumerate(MARKUP)]
    rules = {
        mm.path(name): (tasks[n % len(tasks)], P(MARKUP[n % len(tasks)])) for n, name in enumerate(NAMES)
    }
    with mesh:
        placement = mm.TaskSharding(rules)
        return Named(mm.tabulate(model, sharding=placement), mm.show_placement(model, sharding=placement))


def test_tables(named):
    parts = [f"{printable(name)}: float32[4]" for name in NAMES]
    parts += [
        f"{MARKUP[0]}=2",
        *MARKUP,
        *(f"P({name})" for name in MARKUP),
        "[red]Model\\x1b[0m Summary",
        "[b]Kind\\x1b[0m",
    ]
    check(str(named.table), *parts)
    html = named.table._repr_mimebundle_()["text/html"]
    check(html)
    assert "<b>" not in html and "&lt;b&gt;" in html and "<a" not in html
    coloured = in_colours(named.table)
    for part in NAMES:
        assert printable(part) in coloured
    assert not any(command in coloured for command in ("\x1b[31m", "\x1b]", "\x9b", "\x07", "😄"))


def test_specs_of_meshes_that_jax_made():
    assert spec_text(P(None, ("a\x1b[31m", "b"))) == "P(None, (a\\x1b[31m, b))"


def test_placements(named):
    check(str(named.view), *map(printable, NAMES), *MARKUP)
    drawn = texts(named.view.figure)
    assert set(map(printable, NAMES)) <= set(drawn) and set(MARKUP) <= set(drawn)


def test_timelines():
    events = tuple(Event(name, 0.0, 1.0, "forward", 0, "f") for name in NAMES)
    view = mm.timeline(Timeline(events), title="".join(NAMES))
    check(str(view), printable("".join(NAMES)), *(f"\n{printable(name)} " for name in NAMES))
    coloured = in_colours(view)
    assert all(printable(name) in coloured for name in NAMES) and "\x1b[31m" not in coloured
    drawn = texts(view.figure)
    assert {shortened(printable(name), LONGEST_NAME) for name in NAMES} <= set(drawn)
    title = shortened(printable("".join(NAMES)), LONGEST_TITLE)
    assert any(text.startswith(title) for text in drawn)


def test_programs():
    """Their text names the state paths of arguments."""
    mesh = mm.MultiMesh(axis_sizes=(2, 1), axis_names=("stage", MARKUP[0]))
    tasks = [mm.Task(name, mesh_slice={"stage": n}) for n, name in enumerate(MARKUP[:2])]
    state = nnx.Dict({name: nnx.Param(jax.numpy.ones(4)) for name in NAMES})
    first, second = (mm.task(lambda x: 2 * x, task=task) for task in tasks)
    with mesh:
        program = mm.jit(lambda state: second(first(sum(state[name][...] for name in NAMES)))).program(state)
    check(str(program), *MARKUP[:2], "\\x1b[31ma", "\\x9b2J")


def test_checkpoints_that_others_wrote(capsys):
    every = "".join(NAMES)
    piece = Piece(path=every.replace("/", "|"), type=every, bytes=1, home=0, spec=every)
    found = Contents(
        path=every,
        step=1,
        steps=(1,),
        saved=None,
        versions={every: every},
        processes=1,
        mesh={every: 2},
        metrics={every: 1.0},
        data=None,
        config=None,
        homes=({"task": every, "axes": {every: 2}, "devices": [0]},),
        state=(piece,),
    )
    show(found, Console(width=2000, highlight=False, markup=False, emoji=False))
    shown = capsys.readouterr().out
    text = printable(every, keep="\n")
    one_line = shown.replace("\n", "")
    check(shown, f"metrics {text}=1")
    assert one_line.count(MARKUP[0] + MARKUP[1]) >= 5, one_line
    assert f"mesh {text}=2" in shown


def test_lines_of_commands(capsys):
    for name in NAMES:
        assert main([name]) == 2
        assert main(["schedule", "--schedule", f"{name}.csv"]) == 2
        Display(steps=1).say(name)
        out, errors = capsys.readouterr()
        assert out == printable(name, keep="\n") + "\n"
        check(
            errors,
            f"mmnnx: there is no command {name!r}",
            f"mmnnx: {printable(name, keep=chr(10))}.csv: No such",
        )


def test_names_of_tasks_and_axes_are_printable():
    """They are in programs, which are printed, and in what processes say of each other."""
    for name in COMMANDS:
        with pytest.raises(ValueError, match="printable characters"):
            mm.Task(name)
        with pytest.raises(ValueError, match="printable characters"):
            mm.MultiMesh(axis_sizes=(1,), axis_names=(name,))
        with pytest.raises(ValueError, match="printable characters"):
            mm.TaskMesh(devices=[0], axis_names=(name,))


@examples(100)
@given(st.text())
def test_whatever_the_text(text):
    shown = printable(text)
    assert shown.isprintable() and (shown == text) == text.isprintable()
    assert cell(text).plain.replace("\n", "").isprintable()


def test_what_is_printable_stays():
    for text in ("blocks.0.mlp", "étage 1", "段階", "a b", "[red]", "$x$", ""):
        assert printable(text) == text
    assert printable("a\tb\nc", keep="\t\n") == "a\tb\nc" and printable("a\tb") == "a\\tb"
