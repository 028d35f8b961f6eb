"""What a notebook shows of objects, and what a terminal does."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from IPython.core.formatters import DisplayFormatter
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.inspect import draw_mesh
from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS

NAMES = ["<b>one</b>", "[red]two[/red]"]  # no HTML, and no markup of rich


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.fixture(scope="module")
def shown():
    """A step over two tasks with odd names: all that there is of it."""
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"), devices=jax.devices()[:4])
    tasks = [mm.Task(name, mesh_slice={"stage": n}) for n, name in enumerate(NAMES)]
    rules = {mm.path("layers", n): (task, None) for n, task in enumerate(tasks)}
    sharding = mm.TaskSharding({**rules, mm.path("<i>"): (tasks[0], P("model"))})
    grads = mm.microbatch(nnx.grad(lambda m, x: m(x).mean()), dim=0, size=2, argnum=1, schedule="1f1b")
    step = mm.jit(lambda m, x: grads(m, x))
    with mesh:
        model = mm.jit(lambda: Net(nnx.Rngs(0)), out_shardings=mm.TaskSharding(rules))()
        lowered = step.lower(model, jnp.ones((4, 8)))
        program = step.program(model, jnp.ones((4, 8)))
        plan = mm.plan(step, model, jnp.ones((4, 8)))
    return {
        "model": model,
        "mesh": mesh,
        "task": tasks[0],
        "sharding": sharding,
        "lowered": lowered,
        "program": program,
        "plan": plan,
    }


def unescaped(html: str) -> str:
    for code, character in {"&lt;": "<", "&gt;": ">", "&#x27;": "'", "&quot;": '"'}.items():
        html = html.replace(code, character)
    return html.replace("&amp;", "&")


def text_of(html: str) -> str:
    return unescaped(re.sub(r"<[^>]*>", "", html))


def test_a_program_shows_a_table_and_its_timeline(shown):
    program = shown["program"]
    bundle = program._repr_mimebundle_()
    html, plain = bundle["text/html"], bundle["text/plain"]
    assert not re.search(r"<b>|<i>", html) and all(name in text_of(html) for name in NAMES)
    assert html.count("data:image/png;base64,") == 1
    assert repr(program) in plain.replace("\n", " ") and repr(program) in text_of(html)
    sent = {name: sum(t.nbytes for t in program.transfers if t.target == name) for name in NAMES}
    for name in NAMES:
        (row,) = (line for line in plain.splitlines() if line.strip().startswith(name))
        assert f"{sent[name]} B" in row and " stage=1, model=2 " in row
        assert f" {sum(program.names[c.mesh] == name for c in program.calls)} " in row


def test_a_sharding_shows_its_rules(shown):
    bundle = shown["sharding"]._repr_mimebundle_()
    html, plain = bundle["text/html"], bundle["text/plain"]
    assert not re.search(r"<b>|<i>", html)
    for text in (plain, text_of(html)):
        rows = [line.strip() for line in text.splitlines() if re.match(r"\s*\d", line)]
        assert [re.split(r"\s{2,}", row) for row in rows] == [
            ["0", "path('layers', 0)", NAMES[0], "stage=0", "its logical axes"],
            ["1", "path('layers', 1)", NAMES[1], "stage=1", "its logical axes"],
            ["2", "path('<i>')", NAMES[0], "stage=0", "P(model)"],
        ]


def test_a_mesh_draws_its_devices_with_their_tasks(shown):
    bundle, _ = shown["mesh"]._repr_mimebundle_()
    assert bundle["text/plain"].splitlines() == [
        "4 cpu devices: stage=2, model=2",
        f"{NAMES[0]}: 0-1",
        f"{NAMES[1]}: 2-3",
    ]
    axes = draw_mesh(shown["mesh"]).axes[0]
    at = {text.get_text(): text.get_position() for text in axes.texts}
    assert at == {f"device {n}: {NAMES[n // 2]}": (n // 2, n % 2) for n in range(4)}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["stage=0", "stage=1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["model=0", "model=1"]
    assert "<b>one</b>" not in bundle["image/svg+xml"]


def test_a_model_shows_its_placement_where_the_extension_is_loaded(shown):
    ipython = SimpleNamespace(display_formatter=DisplayFormatter())
    placed, abstract = shown["model"], nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    before, _ = ipython.display_formatter.format(placed)
    mm.load_ipython_extension(ipython)
    with shown["mesh"]:
        bundle, _ = ipython.display_formatter.format(placed)
    assert all(name in bundle["text/plain"] for name in NAMES) and "image/svg+xml" in bundle
    assert "image/svg+xml" not in before and "<b>one</b>" not in bundle["image/svg+xml"]
    assert ipython.display_formatter.format(abstract)[0].keys() == before.keys()  # it lives nowhere


def test_a_terminal_shows_a_line(shown):
    stages = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(64)]
    simulated = by_name("interleaved-1f1b", 16, 64, 2, UNIT_COSTS)
    program = shown["program"]
    objects = [
        *(x for x in shown.values() if not isinstance(x, nnx.Module)),
        shown["lowered"].compile(),
        simulated,
        simulated.stages,
        simulated.timeline,
        program.simulate(),
        *program.fragments,
        *program.instructions,
        mm.Division(stages),
        mm.TaskSharding({mm.path("layers", n): task for n, task in enumerate(stages)}),
        mm.TaskSharding({mm.path("layers"): stages}),
        mm.TaskMesh(devices=range(512)),
        mm.TaskMesh(devices=range(0, 1024, 2)),
        mm.Costs({f"stage{n} forward": 1.0 for n in range(64)}),
    ]
    for x in objects:
        assert len(repr(x)) < 300 and "\n" not in repr(x) and " at 0x" not in repr(x), repr(x)
    assert repr(program).startswith("Program(1f1b, ")
    assert repr(shown["lowered"]).startswith("Lowered(<lambda>: 1f1b, ")
    assert repr(mm.TaskMesh(devices=range(512))).startswith("TaskMesh(devices=range(0, 512), ")
