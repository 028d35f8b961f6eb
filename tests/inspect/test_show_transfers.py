"""`mm.show_transfers`: all transfers are counted, state has its path, and the rest the line that made it."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm

STAGES = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
ROW = 4


def make_mesh() -> mm.MultiMesh:
    return mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])


class Tied(nnx.Module):
    """An embedding that is read on the first stage and on the last, and layers between."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, ROW, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(ROW, ROW, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = jnp.sin(self.layers[0](self.embed(x)))  # the first stage ends here
        return self.embed.attend(self.layers[1](x))


def loss_fn(model, x):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), x).mean()


def step(model, optimizer, x):
    loss, grads = mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, count=4, argnum=1, reduce="mean")(
        model, x
    )
    optimizer.update(model, grads)
    return loss


def line_of(text: str) -> str:
    """A line of this file, as tables show it."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"{Path(__file__).relative_to(Path.cwd())}:{number} "


@pytest.fixture(scope="module")
def shown():
    """What the step sends."""
    with make_mesh():
        placement = mm.TaskSharding(
            {
                mm.path("embed"): STAGES[0],
                mm.path("layers", 0): STAGES[0],
                mm.path("layers", 1): STAGES[1],
            }
        )
        model = mm.jit(lambda: Tied(nnx.Rngs(0)), out_shardings=placement)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param))(model)
        program = mm.jit(step).program(model, optimizer, jnp.zeros((8, 3), int))
    return program, mm.show_transfers(program)


def test_all_transfers_are_counted_most_bytes_first(shown):
    program, table = shown
    assert sum(row.count for row in table.rows) == len(program.transfers) > 0
    assert sum(row.nbytes for row in table.rows) == sum(t.nbytes for t in program.transfers)
    assert [row.nbytes for row in table.rows] == sorted((row.nbytes for row in table.rows), reverse=True)


def test_state_and_its_gradient_have_its_path(shown):
    _, table = shown
    found = {row.what: (row.source, row.target, row.array, row.count) for row in table.rows}
    assert found["0.embed.embedding"] == ("stage0", "stage1", "float32[16,4]", 1)
    assert found["update of 0.embed.embedding"] == ("stage1", "stage0", "float32[16,4]", 1)


def test_anything_else_has_its_line(shown):
    _, table = shown
    (there,) = (row for row in table.rows if row.what.startswith("activation"))
    assert there.what.startswith(f"activation: sin at {line_of('# the first stage ends here')}")
    (back,) = (row for row in table.rows if row.what.startswith("gradient"))
    assert back.what.startswith("gradient: dot_general at") and back.target == "stage0"


def test_what_is_made_of_state_alone_has_its_path():
    """As in the average of two models whose layers live elsewhere."""
    with make_mesh():
        here, there = (
            mm.jit(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), out_shardings=mm.TaskSharding({...: task}))()
            for task in STAGES
        )

        def average(average, model):
            state = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, nnx.state(average), nnx.state(model))
            nnx.update(average, state)

        table = mm.show_transfers(mm.jit(average).program(here, there))
    assert {row.what.split(" at ")[0] for row in table.rows} == {
        "value: mul of 1.kernel",
        "value: mul of 1.bias",
    }


def test_scalars_that_share_an_array_say_so():
    with make_mesh():
        model = mm.jit(
            lambda: nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(8)]),
            out_shardings=mm.TaskSharding({mm.path(range(4)): STAGES[0], ...: STAGES[1]}),
        )()
        scale = mm.jit(lambda model: [a.kernel.sum() * b.kernel for a, b in zip(model[:4], model[4:])])
        (row,) = mm.show_transfers(scale.program(model)).rows
    assert (row.what, row.array) == ("scalars in one array", "float32[4]")


def test_it_is_a_table_with_a_total(shown):
    program, table = shown
    text = str(table)
    assert text == repr(table)
    (total,) = (line for line in text.splitlines() if line.strip().startswith("total"))
    assert total.split()[1] == str(len(program.transfers))
    assert "update of 0.embed.embedding" in table._repr_mimebundle_()["text/html"]


def test_a_program_that_sends_nothing():
    with make_mesh():
        table = mm.show_transfers(mm.jit(lambda x: x + 1).program(np.ones(3)))
    assert table.rows == () and "total" in str(table)


def test_anything_but_a_program_is_an_error(shown):
    program, _ = shown
    with pytest.raises(
        TypeError, match=r"a Program is needed, as of mm.jit\(f\).program\(...\), not Timeline"
    ):
        mm.show_transfers(program.simulate())
