"""`mm.tabulate`: what its tables say, against arrays, Flax, and sums made another way."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import mmnnx as mm
from mmnnx.inspect.model_table import ModelTable, Row
from mmnnx.inspect.module_calls import LINES, record_calls
from mmnnx.inspect.tabulate import tabulate
from mmnnx.inspect.units import bytes_text, count_text, ranges_text

P = PartitionSpec
IMAGES = jax.ShapeDtypeStruct((4, 2), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = mm.task(nnx.Linear, "head")(4, 6, use_bias=False, rngs=rngs)

    def __call__(self, x, train: bool = True):
        x = self.first(x)
        return self.last(self.drop(x) if train else x)

    def logits(self, x):
        return {"logits": self(x, train=False)}


def make_mesh(**sizes: int) -> mm.MultiMesh:
    count = int(np.prod(list(sizes.values())))
    return mm.MultiMesh(
        axis_sizes=tuple(sizes.values()), axis_names=tuple(sizes), devices=jax.devices()[:count]
    )


def placement() -> mm.TaskSharding:
    one, two = (mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2))
    return mm.TaskSharding(
        {
            mm.path("first", "kernel"): (one, P(None, "model")),
            mm.path("first"): (one, None),
            mm.path("last"): (two, P(None, "model")),
        }
    )


@pytest.fixture(scope="module")
def placed():
    """A model on two stages of two devices, its optimizer, and their mesh."""
    mesh = make_mesh(stage=2, model=2)
    with mesh:
        model = mm.jit(lambda: Net(nnx.Rngs(0)), out_shardings=placement())()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param))(model)
    return mesh, model, optimizer


def abstract(make=lambda: Net(nnx.Rngs(0))):
    return nnx.eval_shape(make)


def row(table: ModelTable, *path) -> Row:
    (found,) = [r for r in table.rows if r.path == path]
    return found


def paths(table: ModelTable) -> list[str]:
    return [".".join(map(str, r.path)) for r in table.rows]


def calls(table: ModelTable, *path) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(call.inputs, call.outputs) for call in row(table, *path).calls]


def blocks(table: ModelTable, title: str) -> list[list[list[str]]]:
    """One of the tables as printed: what lies between its rules, by column, by line."""
    lines = str(table).splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().endswith(title)) + 1
    stop = next(n for n in range(start, len(lines)) if lines[n].startswith("└"))
    found = []
    for inside, block in itertools.groupby(lines[start:stop], lambda line: line[0] in "┃│"):
        if inside:
            split = [re.split("[│┃]", line)[1:-1] for line in block]
            found.append([[cell.strip() for cell in column] for column in zip(*split)])
    return found


def cells(table: ModelTable) -> list[list[str]]:
    """The cells of the first table, row by row."""
    return [["\n".join(lines).strip("\n") for lines in row] for row in blocks(table, " Summary")]


def made_since(before: list[jax.Array]) -> list[jax.Array]:
    return [array for array in jax.live_arrays() if not any(array is other for other in before)]


# ---------------------------------------------------------------------------------------------- the table


EXPECTED = """\
                                                                    Net Summary
┏━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━┓
┃ path  ┃ type         ┃ inputs       ┃ outputs      ┃ Param                ┃ RngState ┃ task   ┃ spec                   ┃ devices ┃ bytes/device ┃
┡━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━┩
│       │ Net          │ float32[4,2] │ float32[4,6] │ 36 (144 B)           │ 2 (12 B) │ stage0 │                        │ 0-3     │ ≤ 60 B       │
│       │              │              │              │                      │          │ stage1 │                        │         │              │
│       │              │              │              │                      │          │ all    │                        │         │              │
├───────┼──────────────┼──────────────┼──────────────┼──────────────────────┼──────────┼────────┼────────────────────────┼─────────┼──────────────┤
│ first │ Linear       │ float32[4,2] │ float32[4,4] │ bias: float32[4]     │          │ stage0 │ bias: P()              │ 0-1     │ 32 B         │
│       │              │              │              │ kernel: float32[2,4] │          │        │ kernel: P(None, model) │         │              │
│       │              │              │              │ 12 (48 B)            │          │        │                        │         │              │
├───────┼──────────────┼──────────────┼──────────────┼──────────────────────┼──────────┼────────┼────────────────────────┼─────────┼──────────────┤
│ drop  │ Dropout      │ float32[4,4] │ float32[4,4] │                      │ 2 (12 B) │ all    │ P()                    │ 0-3     │ 12 B         │
├───────┼──────────────┼──────────────┼──────────────┼──────────────────────┼──────────┼────────┼────────────────────────┼─────────┼──────────────┤
│ last  │ Task[Linear] │ float32[4,4] │ float32[4,6] │ kernel: float32[4,6] │          │ stage1 │ P(None, model)         │ 2-3     │ 48 B         │
│       │              │              │              │ 24 (96 B)            │          │        │                        │         │              │
├───────┼──────────────┼──────────────┼──────────────┼──────────────────────┼──────────┼────────┼────────────────────────┼─────────┼──────────────┤
│       │              │              │        Total │ 36 (144 B)           │ 2 (12 B) │        │                        │ 0-3     │ ≤ 60 B       │
└───────┴──────────────┴──────────────┴──────────────┴──────────────────────┴──────────┴────────┴────────────────────────┴─────────┴──────────────┘
                                                           Total Parameters: 38 (156 B)
                                        Tasks
┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━┓
┃ task   ┃ mesh             ┃ devices ┃ Param     ┃ RngState ┃ bytes ┃ bytes/device ┃
┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━┩
│ stage0 │ model=2          │ 0-1     │ 12 (48 B) │          │ 48 B  │ 32 B         │
│ stage1 │ model=2          │ 2-3     │ 24 (96 B) │          │ 96 B  │ 48 B         │
│ all    │ stage=2, model=2 │ 0-3     │           │ 2 (12 B) │ 12 B  │ 12 B         │
└────────┴──────────────────┴─────────┴───────────┴──────────┴───────┴──────────────┘
                 Devices
┏━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┓
┃ devices ┃ task        ┃ bytes on each ┃
┡━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━┩
│ 0-1     │ stage0, all │ 44 B          │
│ 2-3     │ stage1, all │ 60 B          │
└─────────┴─────────────┴───────────────┘"""  # noqa: E501


def test_the_table_of_a_placed_model(placed):
    mesh, model, _ = placed
    with mesh:
        assert str(tabulate(model, IMAGES)) == EXPECTED


def test_the_totals_of_tasks_and_of_devices(placed):
    mesh, model, _ = placed
    with mesh:
        table = tabulate(model)
    heading, body = blocks(table, "Tasks")
    assert [*itertools.chain(*heading)] == [
        "task",
        "mesh",
        "devices",
        "Param",
        "RngState",
        "bytes",
        "bytes/device",
    ]
    assert body == [
        ["stage0", "stage1", "all"],
        ["model=2", "model=2", "stage=2, model=2"],
        ["0-1", "2-3", "0-3"],
        ["12 (48 B)", "24 (96 B)", ""],
        ["", "", "2 (12 B)"],
        ["48 B", "96 B", "12 B"],
        ["32 B", "48 B", "12 B"],
    ]
    assert blocks(table, "Devices")[1] == [
        ["0-1", "2-3"],
        ["stage0, all", "stage1, all"],
        ["44 B", "60 B"],
    ]


def test_sums_are_those_of_the_arrays(placed):
    mesh, model, optimizer = placed
    for held in (model, optimizer):
        with mesh:
            table = tabulate(held)
        arrays = [a for a in jax.tree.leaves(nnx.state(held)) if isinstance(a, jax.Array)]
        assert sum(p.size for p in table.pieces) == sum(a.size for a in arrays)
        assert sum(p.bytes for p in table.pieces) == sum(a.nbytes for a in arrays)
        held_by: Counter[int] = Counter()
        for array in arrays:
            plain = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
            for shard in plain.addressable_shards:
                held_by[shard.device.id] += shard.data.nbytes
        assert table.by_device == held_by
        assert sum(p.bytes for some in table.by_home.values() for p in some) == sum(a.nbytes for a in arrays)
        assert row(table).below == table.pieces


def test_an_abstract_model_with_a_placement_is_as_the_real_one(placed):
    mesh, model, optimizer = placed
    with mesh:
        assert str(tabulate(abstract(), IMAGES, sharding=placement())) == str(tabulate(model, IMAGES))
        slots = abstract(lambda: nnx.Optimizer(Net(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param))
        assert str(tabulate(slots, sharding=placement())) == str(tabulate(optimizer))


def test_a_model_that_is_not_placed():
    table = tabulate(Net(nnx.Rngs(0)), jnp.ones((4, 2)))
    assert cells(table)[0] == ["path", "type", "inputs", "outputs", "Param", "RngState"]
    assert str(tabulate(abstract(), IMAGES)) == str(table)
    assert "Tasks" not in str(table)
    assert cells(tabulate(abstract()))[0] == ["path", "type", "Param", "RngState"]


def test_what_is_not_placed_of_a_placed_model(placed):
    mesh, model, _ = placed

    class Both(nnx.Module):
        def __init__(self):
            self.placed, self.free = model, abstract(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    with mesh:
        table = tabulate(Both())
    assert [column[-1] for column in blocks(table, "Tasks")[1]] == [
        "not placed",
        "",
        "",
        "9 (36 B)",
        "",
        "36 B",
        "",
    ]
    assert sum(p.bytes for p in table.by_home[None]) == 36


def test_kinds_have_columns_of_their_own():
    class All(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.cache = nnx.Cache(jnp.zeros((2, 5), jnp.bfloat16))
            self.rngs = nnx.Rngs(0, params=1)
            self.raw = nnx.data(jnp.ones(7))
            self.nested = nnx.Param({"a": jnp.ones(2), "b": jnp.ones((2, 2), jnp.int8)})
            self.name = "static"

    table = tabulate(All())
    assert cells(table)[0] == ["path", "type", "Array", "BatchStat", "Cache", "Param", "RngState"]
    assert row(table).type == "All"
    assert cells(table)[1][2:] == [
        "raw: float32[7]\n7 (28 B)",
        "6 (24 B)",
        "cache: bfloat16[2,5]\n10 (20 B)",
        "nested: float32[2]\nnested: int8[2,2]\n12 (36 B)",
        "4 (24 B)",
    ]
    assert paths(table) == ["", "norm"]  # random numbers are those of the module that has them


def test_columns_and_sizes_are_those_of_flax():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.net = Net(rngs)

        def __call__(self, x):
            return self.net(self.norm(x)[:, :2])

    model = Two(nnx.Rngs(0))
    theirs = nnx.tabulate(model, jnp.ones((4, 3)), console_kwargs={"force_terminal": False, "width": 200})
    ours = cells(tabulate(model, jnp.ones((4, 3))))
    total = re.search(r"Total Parameters: (.*\))", theirs)
    assert total and total[0] in str(tabulate(model))
    heading, *_, footer = (line for line in theirs.splitlines() if line[0] in "┃│")
    assert [c.strip() for c in heading.split("┃")][1:-1] == ours[0]
    assert [c.strip() for c in footer.split("│")][1:-1] == ours[-1]


def test_long_lists_are_cut():
    class Many(nnx.Module):
        def __init__(self):
            for n in range(30):
                setattr(self, f"w{n:02}", nnx.Param(jnp.ones(n + 1)))

    (_, _, cell) = cells(tabulate(Many()))[1]
    assert cell.split("\n")[0] == "w00: float32[1]"
    assert cell.split("\n")[-2:] == ["… 19 more", "465 (1.9 KB)"]
    assert len(cell.split("\n")) == 13


# --------------------------------------------------------------------------------------------- how it shows


def test_plain_text_has_no_escapes(placed, capsys, monkeypatch):
    mesh, model, _ = placed
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    with mesh:
        table = tabulate(model, IMAGES)
    print(table)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.rstrip("\n") == str(table) == repr(table)
    assert not any(line != line.rstrip() for line in printed.splitlines())
    assert len({len(line) for line in printed.splitlines() if line.startswith("│ first")}) == 1


def test_a_terminal_has_styles_and_a_pipe_has_none():
    table = tabulate(abstract(), IMAGES)
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=150, _environ={"TERM": "xterm"})
        console.print(table)
        assert ("\x1b[" in file.getvalue()) == terminal
        assert "Task[Linear]" in file.getvalue()


def test_a_notebook_shows_html_with_every_cell(placed):
    mesh, model, _ = placed
    with mesh:
        table = tabulate(model, IMAGES)
    bundle = table._repr_mimebundle_()
    assert bundle["text/plain"] == str(table)
    text = re.sub("<[^>]*>", "", bundle["text/html"])
    for line in itertools.chain(*cells(table)):
        for part in line.split("\n"):
            assert part.replace("&", "&amp;") in text
    assert bundle["text/html"].startswith("<pre") and "font-weight: bold" in bundle["text/html"]
    assert "\x1b" not in bundle["text/html"]


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0"),
        (5790, "5,790"),
        (999_499, "999,499"),
        (999_500, "1.00 M"),
        (9_996_000, "10.0 M"),
        (123_456_789, "123 M"),
        (8_030_261_248, "8.03 B"),
        (70_553_706_496, "70.6 B"),
        (1_500_000_000_000, "1.50 T"),
    ],
)
def test_counts(count, text):
    assert count_text(count) == text


def test_bytes_and_ranges():
    sizes = [80, 1000, 1001, 23_200, 5_000_000, 16_060_522_496, 1_200_000_000_000]
    assert [bytes_text(n) for n in sizes] == [
        "80 B",
        "1.0 KB",
        "1.0 KB",
        "23.2 KB",
        "5.0 MB",
        "16.1 GB",
        "1.2 TB",
    ]
    assert ranges_text([8, 3, 1, 2, 2, 10]) == "1-3, 8, 10"
    assert ranges_text([]) == ""


# ----------------------------------------------------------------------------------------- rows and sharing


def test_depth_folds_deeper_modules():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.nets = nnx.List([Net(rngs), Net(rngs)])

    table = tabulate(abstract(lambda: Outer(nnx.Rngs(0))))
    assert paths(table)[:5] == ["", "nets", "nets.0", "nets.0.drop", "nets.0.first"]
    for depth, number in ((0, 1), (1, 2), (2, 4), (3, 10), (9, 10)):
        folded = tabulate(abstract(lambda: Outer(nnx.Rngs(0))), depth=depth)
        assert paths(folded) == [p for p, r in zip(paths(table), table.rows) if len(r.path) <= depth]
        assert len(folded.rows) == number
        assert cells(folded)[1] == cells(table)[1]
        assert cells(folded)[-1] == cells(table)[-1]
    assert row(folded, "nets").type == "List"
    with pytest.raises(ValueError, match="depth=.*not -1"):
        tabulate(abstract(), depth=-1)


def test_shared_modules_and_variables_count_once():
    class BoundProgram(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(3, 3, rngs=rngs)
            self.b = self.a
            self.c = nnx.Linear(3, 3, rngs=rngs)
            self.c.kernel = self.a.kernel

        def __call__(self, x):
            return self.c(self.b(self.a(x)))

    for model in (BoundProgram(nnx.Rngs(0)), abstract(lambda: BoundProgram(nnx.Rngs(0)))):
        table = tabulate(model, jnp.ones((1, 3)))
        assert sum(p.size for p in table.pieces) == 9 + 3 + 3
        by_path = {line[0]: line for line in cells(table)[2:-1]}
        assert by_path["a"][4] == "bias: float32[3]\nkernel: float32[3,3]\n12 (48 B)"
        assert by_path["b"][1:] == ["Linear\nas a", "", "", ""]
        assert by_path["c"][4] == "bias: float32[3]\nkernel: as a.kernel\n3 (12 B)"
        assert calls(table, "a") == [(("float32[1,3]",), ("float32[1,3]",))]


def test_a_rule_for_any_path_places_shared_state():
    class BoundProgram(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(4, 4, rngs=rngs)
            self.out = self.embed

    sharding = mm.TaskSharding({mm.path("out"): mm.Task("last", mesh_slice={"stage": 1})})
    with make_mesh(stage=2):
        table = tabulate(abstract(lambda: BoundProgram(nnx.Rngs(0))), sharding=sharding)
        real = mm.jit(lambda: BoundProgram(nnx.Rngs(0)), out_shardings=sharding)()
        assert str(tabulate(real)) == str(table)
    assert table.by_device == {1: 64}


def test_a_module_that_knows_its_parent():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent, self.w = parent, nnx.Param(jnp.ones(3))

    class Parent(nnx.Module):
        def __init__(self):
            self.child = Child(self)

    table = tabulate(Parent())
    assert paths(table) == ["", "child", "child.parent"]
    assert row(table, "child", "parent").same_as == () and "as the whole" in str(table)
    assert sum(p.size for p in table.pieces) == 3


def test_siblings_are_in_the_order_of_their_calls():
    class Backwards(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b, self.c = (nnx.Linear(2, 2, rngs=rngs) for _ in range(3))

        def __call__(self, x):
            return self.a(self.c(x))

    model = abstract(lambda: Backwards(nnx.Rngs(0)))
    assert paths(tabulate(model)) == ["", "a", "b", "c"]
    assert paths(tabulate(model, IMAGES)) == ["", "c", "a", "b"]
    assert calls(tabulate(model, IMAGES), "b") == []


def test_an_optimizer(placed):
    mesh, _, optimizer = placed
    with mesh:
        table = tabulate(optimizer)
    assert paths(table) == ["", "opt_state.0", "opt_state.0.mu", "opt_state.0.nu"]
    assert [r.type for r in table.rows] == ["Optimizer", "ScaleByAdamState", "State", "State"]
    mu = cells(table)[3]
    assert mu[4:8] == [
        "first.bias: float32[4]\nfirst.kernel: float32[2,4]\nlast.kernel: float32[4,6]\n36 (144 B)",
        "stage0\nstage1",
        "first.bias: P()\nfirst.kernel: P(None, model)\nlast.kernel: P(None, model)",
        "0-3",
    ]


# ------------------------------------------------------------------------------------- inputs and outputs


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x, y):
        return self.inner(x), {"y": self.inner(y), "again": self.inner(x)}


def test_each_different_call_is_listed():
    table = tabulate(abstract(lambda: Twice(nnx.Rngs(0))), IMAGES, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert calls(table, "inner") == [
        (("float32[4,2]",), ("float32[4,2]",)),
        (("float32[2]",), ("float32[2]",)),
    ]
    assert calls(table) == [
        (("float32[4,2]", "float32[2]"), ("float32[4,2]", "again: float32[4,2]", "y: float32[2]"))
    ]
    assert cells(table)[1][2] == "float32[4,2]\nfloat32[2]"
    assert cells(table)[2][2:4] == ["float32[4,2]\nfloat32[2]"] * 2


def test_other_methods_and_keywords():
    table = tabulate(abstract(), IMAGES, method="logits")
    assert calls(table) == [(("float32[4,2]",), ("logits: float32[4,6]",))]
    assert calls(table, "drop") == []
    table = tabulate(abstract(), x=np.ones((3, 2), np.float32), train=False)
    assert calls(table) == [(("train: False", "x: float32[3,2]"), ("float32[3,6]",))]
    assert calls(table, "first") == [(("float32[3,2]",), ("float32[3,4]",))]

    class NoArguments(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        def table(self):
            return self.w + 1

    assert calls(tabulate(NoArguments(), method="table")) == [((), ("float32[3]",))]


def test_nnx_objects_and_keys_as_inputs():
    class Takes(nnx.Module):
        def __call__(self, other, rngs, key):
            return other(jax.random.normal(rngs(), (1, 2))) + jax.random.uniform(key), rngs

    table = tabulate(Takes(), nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Rngs(0), key=jax.random.key(0))
    assert calls(table) == [(("Linear", "Rngs", "key: key<fry>[]"), ("float32[1,3]", "Rngs"))]


def test_many_arrays_are_cut():
    class Takes(nnx.Module):
        def __call__(self, xs):
            return sum(xs)

    ((inputs, outputs),) = calls(tabulate(Takes(), [jnp.ones(3)] * 20))
    assert len(inputs) == LINES and inputs[-1] == "… 15 more" and outputs == ("float32[3]",)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Jitted(Block):
    @nnx.jit
    def __call__(self, x):
        return self.linear(x)


class Rematted(Block):
    @nnx.remat
    def __call__(self, x):
        return self.linear(x)


@nnx.jit
def call(block, x):
    return block(x)


class Transformed(nnx.Module):
    def __init__(self, rngs):
        self.jitted = Block(rngs)
        self.same = Block(rngs)
        self.method = Jitted(rngs)
        self.remat = Block(rngs)
        self.rematted = Rematted(rngs)
        self.scanned = nnx.vmap(Block, in_axes=0)(nnx.Rngs(0).split(3))
        self.mapped = nnx.vmap(Block, in_axes=0)(nnx.Rngs(0).split(3))

    def __call__(self, x):
        x = call(self.same, call(self.jitted, x))
        x = nnx.remat(Block.__call__)(self.remat, self.rematted(self.method(x)))
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.scanned)
        return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.mapped, x)


def test_calls_inside_transformations():
    model = Transformed(nnx.Rngs(0))
    one = [(("float32[4,2]",), ("float32[4,2]",))]
    for _ in range(2):  # a jitted function is traced again
        table = tabulate(model, IMAGES)
        for name in ("jitted", "same", "method", "remat", "rematted", "scanned", "mapped"):
            assert calls(table, name) == calls(table, name, "linear") == one, name
    assert calls(table) == [(("float32[4,2]",), ("float32[3,4,2]",))]
    assert row(table, "scanned").below[1].shape == (3, 2, 2)


def test_equal_modules_may_be_stacked():
    class Stacks(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs), Block(rngs)])
            self.last = nnx.Linear(2, 5, rngs=rngs)

        def __call__(self, x):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.blocks)
            return self.last(jax.lax.scan(lambda x, block: (block(x), None), x, stacked)[0])

    table = tabulate(Stacks(nnx.Rngs(0)), IMAGES)
    assert calls(table) == [(("float32[4,2]",), ("float32[4,5]",))]
    assert calls(table, "last") == [(("float32[4,2]",), ("float32[4,5]",))]
    assert calls(table, "blocks", 0) == [(("float32[4,2]",), ("float32[4,2]",))]


def test_subclasses_show_under_their_names():
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)[:1]

    class Holder(nnx.Module):
        def __init__(self, rngs):
            self.scaled, self.tasked = Scaled(2, 2, rngs=rngs), mm.task(Scaled(2, 2, rngs=rngs), "t")

        def __call__(self, x):
            return self.tasked(self.scaled(x))

    table = tabulate(abstract(lambda: Holder(nnx.Rngs(0))), IMAGES)
    assert [r.type for r in table.rows] == ["Holder", "Scaled", "Task[Scaled]"]
    assert "Task[Net] Summary" in str(tabulate(mm.task(Net, "net")(nnx.Rngs(0))))
    assert calls(table, "scaled") == [(("float32[4,2]",), ("float32[1,2]",))]
    assert calls(table, "tasked") == [(("float32[1,2]",), ("float32[1,2]",))]


def test_nothing_is_computed_and_nothing_changes():
    model = Net(nnx.Rngs(0))
    count, original = model.drop.rngs.count[...], nnx.Linear.__dict__["__call__"]
    before, attributes = jax.live_arrays(), set(vars(model.first))
    tabulate(model, IMAGES)
    assert not made_since(before)
    assert model.drop.rngs.count[...] == count
    assert set(vars(model.first)) == attributes
    assert nnx.Linear.__dict__["__call__"] is original


def test_an_error_of_the_model_is_raised_as_it_is():
    original = nnx.Linear.__dict__["__call__"]
    with pytest.raises(TypeError, match="dot_general") as caught:
        tabulate(abstract(), jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert caught.value.__notes__[-1:] == ["while Net.__call__ was traced with the inputs of mm.tabulate"]
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert nnx.Linear.__dict__["__call__"] is original


def test_constraints_and_tasks_of_the_model_do_not_matter(placed):
    mesh, *_ = placed

    class Constrained(nnx.Module):
        def __init__(self, rngs):
            self.inner = mm.task(Block(rngs), task=mm.Task("t", mesh_slice={"stage": 0}))

        def __call__(self, x):
            return mm.with_sharding_constraint(self.inner(x), P("no such axis"))

    model = abstract(lambda: Constrained(nnx.Rngs(0)))
    assert calls(tabulate(model, IMAGES)) == [(("float32[4,2]",), ("float32[4,2]",))]
    with mesh:
        assert calls(tabulate(model, IMAGES)) == [(("float32[4,2]",), ("float32[4,2]",))]


def test_calls_by_path():
    found = record_calls(abstract(), (IMAGES,), {"train": False})
    assert list(found) == [(), ("first",), ("last",)]


# ---------------------------------------------------------------------------------------------- placement


def tasks_of(table: ModelTable) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(home.task, home.axes, home.devices) for home in table.by_home if home is not None]


def weights(**at) -> nnx.Module:
    class Weights(nnx.Module):
        def __init__(self):
            for name, (value, sharding) in at.items():
                setattr(self, name, nnx.Param(jax.device_put(value, sharding)))

    return Weights()


def test_places_have_names():
    mesh = make_mesh(stage=2, data=2, model=2)
    rest = jax.sharding.Mesh(jax.devices()[1:7:2], "x")
    model = weights(
        a=(jnp.ones((4, 2)), NamedSharding(mesh.slice(stage=1), P(("data", "model"), None))),
        b=(jnp.ones((2, 2)), NamedSharding(mesh.slice(stage=0, data=1), P("model"))),
        c=(jnp.ones(()), NamedSharding(mesh.mesh, P())),
        d=(jnp.ones(3), jax.devices()[5]),
        e=(jnp.ones(3), NamedSharding(rest, P("x"))),
    )
    with mesh:
        table = tabulate(model)
    assert {p.path[0]: (p.placed.home.task, p.placed.spec, p.placed.shard_bytes) for p in table.pieces} == {
        "a": ("stage=1", "P((data, model), None)", 8),
        "b": ("stage=0, data=1", "P(model)", 8),
        "c": ("all", "P()", 4),
        "d": ("device 5", "", 12),
        "e": ("devices 1, 3, 5", "P(x)", 4),
    }
    assert [home[0] for home in tasks_of(tabulate(model))] == [
        "devices 2-3",
        "device 5",
        "devices 0-7",  # these span others
        "devices 1, 3, 5",
        "devices 4-7",
    ]


def test_device_numbers_are_those_of_the_program():
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=[jax.devices()[6], jax.devices()[3]])
    model = weights(w=(jnp.ones(3), NamedSharding(mesh.slice(stage=1), P())))
    with mesh:
        assert tasks_of(tabulate(model)) == [("stage=1", "", (1,))]
    assert tasks_of(tabulate(model)) == [("device 3", "", (3,))]


def test_several_tasks_on_one_mesh():
    two = [mm.Task(name, mesh_slice={"stage": 0}) for name in ("encoder", "decoder")]
    sharding = mm.TaskSharding({mm.path("first"): two[0], mm.path("last"): two[1]})
    with make_mesh(stage=1):
        abstract_table = tabulate(abstract(), sharding=sharding)
        real = mm.jit(lambda: Net(nnx.Rngs(0)), out_shardings=sharding)()
        table = tabulate(real)
    assert [home[0] for home in tasks_of(abstract_table)] == ["all", "decoder", "encoder"]
    assert [home[0] for home in tasks_of(table)] == ["encoder, decoder"]
    assert table.by_device == abstract_table.by_device


def test_an_empty_array_that_is_divided_between_tasks():
    stages = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(4)]
    model = weights(w=(jnp.zeros((4, 0, 3)), None), b=(jnp.zeros((4, 2)), None))
    with make_mesh(stage=4):
        table = tabulate(model, sharding=mm.TaskSharding({...: stages}))
    assert [home[0] for home in tasks_of(table)] == [f"stage{n}" for n in range(4)]
    assert table.by_device == dict.fromkeys(range(4), 8)


def test_scalars_without_a_multimesh_are_on_the_devices_of_all_tasks():
    one, two = (mm.Task(f"t{n}", mesh=mm.TaskMesh(devices=[n, n + 4])) for n in range(2))
    table = tabulate(
        abstract(), sharding=mm.TaskSharding({mm.path("first"): one, mm.path("last"): (two, P("axis0"))})
    )
    assert tasks_of(table) == [
        ("t0", "axis0=2", (0, 4)),
        ("t1", "axis0=2", (1, 5)),
        ("all", "device=4", (0, 1, 4, 5)),
    ]


def test_slots_follow_their_parameters_rather_than_a_catch_all():
    one, two = (mm.Task(f"t{n}", mesh_slice={"stage": n}) for n in range(2))
    sharding = mm.TaskSharding({mm.path("last"): two, ...: one})
    slots = abstract(lambda: nnx.Optimizer(Net(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param))
    with make_mesh(stage=2):
        found = {p.path: p.placed.home.task for p in tabulate(slots, sharding=sharding).pieces if p.placed}
    assert found["opt_state", 0, "mu", "last", "kernel"] == "t1"
    assert found["opt_state", 0, "nu", "first", "kernel"] == "t0"


def test_logical_names_are_translated():
    def make():
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"), eager_sharding=False)
        return nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0))

    task = mm.Task("t", mesh_slice={"stage": 0}, logical_axes={"mlp": "model"})
    with make_mesh(stage=2, model=2):
        table = tabulate(abstract(make), sharding=mm.TaskSharding({...: task}))
    assert {p.path[0]: p.placed.spec for p in table.pieces} == {"bias": "P()", "kernel": "P(None, model)"}


def test_mistakes_in_the_placement(placed):
    mesh, *_ = placed
    one = mm.Task("one", mesh_slice={"stage": 0})
    with mesh:
        with pytest.raises(
            mm.PlacementError, match=r"no filter places last.kernel \(Param, float32\[4, 6\]\)"
        ):
            tabulate(abstract(), sharding=mm.TaskSharding({mm.path("first"): one}))
        with pytest.raises(mm.PlacementError, match=r"no state is placed by path\('lost'\)"):
            tabulate(abstract(), sharding=mm.TaskSharding({mm.path("lost"): one, ...: one}))
        with pytest.raises(mm.PlacementError, match="its mesh has no axis 'x'"):
            tabulate(abstract(), sharding=mm.TaskSharding({mm.path("first"): (one, P("x"))}))
    with pytest.raises(ValueError, match="none is current"):
        tabulate(abstract(), sharding=placement())
    with pytest.raises(TypeError, match=r"sharding= is a TaskSharding, .*not (PartitionSpec|P)\("):
        tabulate(abstract(), sharding=P("x"))


def test_mistakes_in_the_model():
    with pytest.raises(TypeError, match="an NNX object is needed.*not int$"):
        tabulate(3)
    with pytest.raises(TypeError, match="an NNX object is needed"):
        tabulate(nnx.Param(jnp.ones(3)))
    with pytest.raises(TypeError, match="Net has no method 'embed'"):
        tabulate(abstract(), IMAGES, method="embed")
    with pytest.raises(TypeError, match="Optimizer has no method '__call__'"):
        tabulate(nnx.Optimizer(Net(nnx.Rngs(0)), optax.sgd(1.0), wrt=nnx.Param), IMAGES)


# --------------------------------------------------------------------------------------------------- size


class Big(nnx.Module):
    """The sizes of Llama 3 70B: 80 layers of width 8192, with 64 heads, 8 of keys, and an MLP of 28672."""

    def __init__(self, layers, rngs):
        def linear(*sizes):
            init = nnx.initializers.zeros  # traces fastest
            return nnx.Linear(*sizes, use_bias=False, kernel_init=init, param_dtype=jnp.bfloat16, rngs=rngs)

        self.embed = nnx.Embed(128_256, 8192, param_dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(
            nnx.Dict(
                query=linear(8192, 8192),
                key=linear(8192, 1024),
                value=linear(8192, 1024),
                out=linear(8192, 8192),
                gate=linear(8192, 28672),
                up=linear(8192, 28672),
                down=linear(28672, 8192),
                norms=nnx.List(nnx.RMSNorm(8192, param_dtype=jnp.bfloat16, rngs=rngs) for _ in range(2)),
            )
            for _ in range(layers)
        )
        self.norm = nnx.RMSNorm(8192, param_dtype=jnp.bfloat16, rngs=rngs)
        self.head = linear(8192, 128_256)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            y = block.norms[0](x)
            query, _, value = block.query(y), block.key(y), block.value(y)
            x = x + block.out(query + jnp.tile(value, 8))
            y = block.norms[1](x)
            x = x + block.down(nnx.silu(block.gate(y)) * block.up(y))
        return self.head(self.norm(x))


@pytest.mark.parametrize("layers", [4, pytest.param(80, marks=pytest.mark.slow)])
def test_a_large_model_needs_no_memory(layers):
    model = abstract(lambda: Big(layers, nnx.Rngs(0)))
    before = jax.live_arrays()
    task = mm.Task("all of it", mesh_slice={})
    with make_mesh(model=8):
        table = tabulate(
            model,
            jax.ShapeDtypeStruct((1, 4096), jnp.int32),
            sharding=mm.TaskSharding({mm.path("blocks", ..., "kernel"): (task, P(None, "model")), ...: task}),
        )
        text = str(table)
    assert not made_since(before)
    assert len(table.rows) == 1 + 3 + 1 + layers * 11
    blocks = layers * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    size = blocks + (2 * 128_256 + 1 + layers * 2) * 8192
    assert sum(p.size for p in table.pieces) == size
    assert {4: "5.52 B (11.0 GB)", 80: "70.6 B (141.1 GB)"}[layers] in text
    assert set(table.by_device.values()) == {2 * (size - blocks + blocks // 8)}
    assert calls(table, "blocks", layers - 1, "down") == [
        (("bfloat16[1,4096,28672]",), ("bfloat16[1,4096,8192]",))
    ]


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, name="head")(linen.Dense(4, name="body")(x))


def test_the_parts_of_a_linen_module_have_rows():
    """`nnx.bridge.ToNNX` has dicts for them; a dict of an NNX module has none."""
    model = nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 2)))
    table = tabulate(nnx.Dict(inner=model, other=nnx.data({"a": nnx.Param(jnp.ones(5))})))
    assert paths(table) == ["", "inner", "inner.body", "inner.head"]
    assert sum(piece.size for piece in row(table, "inner", "body").below) == 2 * 4 + 4
