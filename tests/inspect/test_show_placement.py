"""`mm.show_placement`: boxes, parts and bytes, in the text and in what matplotlib was told to draw."""

from __future__ import annotations

import io
import re

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle

import mmnnx as mm
from mmnnx.inspect.colours import LIMIT, OTHER, memory_colour
from mmnnx.inspect.figure_style import LIGHT, WIDTH
from mmnnx.inspect.placement import PlacementView, show_placement
from mmnnx.inspect.placement_picture import BAR
from mmnnx.inspect.submesh import PARTS, Part, Submesh
from mmnnx.inspect.units import bytes_text
from mmnnx.modules import LM, LMConfig
from tests.slow import grid

P = PartitionSpec


class Net(nnx.Module):
    def __init__(self, blocks: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = nnx.List(nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(blocks))
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def make_mesh(**sizes: int) -> mm.MultiMesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return mm.MultiMesh(axis_sizes=tuple(sizes.values()), axis_names=tuple(sizes), devices=devices)


def stages(number: int) -> list[mm.Task]:
    return [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(number)]


def placement(number: int, each: int = 2) -> mm.TaskSharding:
    rules = {mm.path("embed"): (stages(number)[0], P("model"))}
    for n, stage in enumerate(stages(number)):
        rules[mm.path("blocks", range(each * n, each * n + each))] = (stage, P(None, "model"))
    return mm.TaskSharding(rules)


def abstract(blocks: int = 8):
    return nnx.eval_shape(lambda: Net(blocks, nnx.Rngs(0)))


def abstract_optimizer(blocks: int = 8):
    return nnx.eval_shape(lambda: nnx.Optimizer(Net(blocks, nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param))


def four_by_two(*, memory=None) -> PlacementView:
    return show_placement(
        abstract(),
        abstract_optimizer(),
        sharding=placement(4),
        memory=memory,
        mesh=make_mesh(stage=4, model=2),
    )


def large(stages: int = 16, devices: int = 8, memory: int | None = 8_000_000_000) -> PlacementView:
    """What `show_placement` makes of more devices than there are here."""
    boxes = []
    for n in range(stages):
        numbers = tuple(range(devices * n, devices * n + devices))
        parts = [
            Part(f"LM: blocks.{5 * n}-{5 * n + 4}", 2_000_000_000, "LM: blocks"),
            Part("Optimizer: mu", 1_900_000_000, "Optimizer: mu", "optimizer state"),
            Part("Optimizer: nu", 1_900_000_000, "Optimizer: nu", "optimizer state"),
        ]
        if n in (0, stages - 1):
            parts.append(Part("LM: embed", 525_000_000, "LM: embed"))
        total = sum(part.bytes for part in parts)
        boxes.append(
            Submesh(f"stage{n}", f"model={devices}", numbers, tuple(parts), dict.fromkeys(numbers, total))
        )
    return PlacementView(("LM", "Optimizer"), tuple(boxes), memory, 0)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def rectangles(figure, height: float) -> list[Rectangle]:
    return [
        p for p in figure.axes[0].patches if isinstance(p, Rectangle) and abs(p.get_height() - height) < 1e-6
    ]


def is_red(colour: str) -> bool:
    red, green, blue = to_rgb(colour)
    return red > 1.2 * max(green, blue)


def bars(figure) -> list[list[tuple[str, float]]]:
    """For each box, the colour and the length of each piece of its bar, as a share of the whole bar."""
    found: list[list[tuple[str, float]]] = []
    for piece in rectangles(figure, BAR):
        if to_hex(piece.get_facecolor()) == LIGHT.pale:
            found.append([])
            whole = piece.get_width()
        else:
            found[-1].append((to_hex(piece.get_facecolor()), piece.get_width() / whole))
    return found


# ------------------------------------------------------------------------------------------- what it says


def test_the_text_of_a_placed_model():
    mesh = make_mesh(stage=2, model=2)
    with mesh:
        model = mm.jit(lambda: Net(4, nnx.Rngs(0)), out_shardings=placement(2))()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param))(model)
        view = show_placement(model, optimizer, memory=10_000)
        assert str(view).splitlines() == [
            "Net and Optimizer on 4 devices, state per device 6.2 KB of 10.0 KB",
            "stage0  devices 0-1 (model=2): 6.2 KB on each, 62% of 10.0 KB",
            "        Net: blocks.0-1 1.0 KB, Net: embed 2.0 KB, Net: drop 12 B, Optimizer: trace 3.1 KB, "
            "Optimizer: step 4 B",
            "stage1  devices 2-3 (model=2): 2.1 KB on each, 21% of 10.0 KB",
            "        Net: blocks.2-3 1.0 KB, Net: drop 12 B, Optimizer: trace 1.0 KB, Optimizer: step 4 B",
        ]
        assert repr(view) == str(view)


def test_bytes_are_those_of_the_arrays():
    mesh = make_mesh(stage=2, model=2)
    with mesh:
        model = mm.jit(lambda: Net(4, nnx.Rngs(0)), out_shardings=placement(2))()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param))(model)
        view = show_placement(model, optimizer)
    held = dict.fromkeys(range(4), 0)
    for array in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))):
        plain = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        for shard in plain.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert {d: n for box in view.submeshes for d, n in box.bytes.items()} == held
    for box in view.submeshes:
        assert sum(part.bytes for part in box.parts) == box.most
    assert str(show_placement(abstract(4), abstract_optimizer(4), sharding=placement(2), mesh=mesh)) == str(
        view
    )


def test_parts_are_the_top_level_ones_of_each_model():
    view = four_by_two()
    assert [box.name for box in view.submeshes] == ["stage0", "stage1", "stage2", "stage3"]
    assert [box.devices for box in view.submeshes] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {part.name: part.bytes for part in view.submeshes[0].parts} == {
        "Net: embed": 2048,
        "Net: blocks.0-1": 1024,
        "Net: drop": 12,
        "Optimizer: mu": 3072,
        "Optimizer: nu": 3072,
        "Optimizer: count": 4,
        "Optimizer: step": 4,
    }
    assert view.submeshes[3].parts[0] == Part("Net: blocks.6-7", 1024, "Net: blocks")
    alone = show_placement(abstract(), sharding=placement(4), mesh=make_mesh(stage=4, model=2))
    assert [part.name for part in alone.submeshes[0].parts] == ["blocks.0-1", "embed", "drop"]


def test_models_of_one_class_are_numbered():
    with make_mesh(stage=4, model=2):
        view = show_placement(abstract(), abstract(), sharding=placement(4))
    assert view.names == ("Net 1", "Net 2")
    assert view.submeshes[1].most == 2 * 1024 + 2 * 12


def test_small_parts_are_summed_up():
    parts = [Part(f"p{n}", 1000 - n, f"p{n}") for n in range(9)]
    box = Submesh("s", "", (0,), tuple(parts), {0: 9000})
    assert [p.name for p in box.main_parts()] == ["p0", "p1", "p2", "p3", "5 more"]
    assert sum(p.bytes for p in box.main_parts()) == sum(p.bytes for p in parts)
    few = Submesh("s", "", (0,), tuple(parts[:PARTS]), {0: 5000})
    assert few.main_parts() == few.parts
    tiny = (Part("a", 10**6, "a"), Part("b", 12, "b"), Part("c", 4, "c"))
    assert [p.name for p in Submesh("s", "", (0,), tiny, {0: 10**6}).main_parts()] == ["a", "2 more"]
    assert Submesh("s", "", (0,), tiny[:2], {0: 10**6}).main_parts() == tiny[:2]


def test_state_on_all_devices_counts_on_each():
    """It has a box only where there is nothing else."""
    mesh = make_mesh(stage=4, model=2)
    one = mm.TaskSharding({mm.path({"embed", "blocks"}): stages(4)[1]})
    view = show_placement(abstract(2), sharding=one, mesh=mesh)
    assert [(box.name, box.axes, box.devices) for box in view.submeshes] == [
        ("stage1", "model=2", (2, 3)),
        ("all", "", (0, 1, 4, 5, 6, 7)),
    ]
    assert view.submeshes[1].parts == (Part("drop", 12, "drop"),)
    assert view.submeshes[0].parts[-1] == Part("drop", 12, "drop")


def test_tasks_that_share_devices_share_a_box():
    first, second = (mm.Task(name, mesh_slice={"stage": 0}) for name in "ab")
    sharding = mm.TaskSharding({mm.path("embed"): (first, P("model")), mm.path("blocks"): second})
    view = show_placement(abstract(1), sharding=sharding, mesh=make_mesh(stage=1, model=2))
    (box,) = view.submeshes
    assert (box.name, box.devices) == ("a, b", (0, 1))


def test_meshes_that_overlap():
    def weight(*devices):
        sharding = NamedSharding(
            jax.sharding.Mesh(np.array([jax.devices()[d] for d in devices]), "x"), P("x")
        )
        return nnx.Param(jax.device_put(jnp.ones(8), sharding))

    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = weight(0, 1), weight(1, 2)

    view = show_placement(Two())
    assert [(box.name, box.bytes) for box in view.submeshes] == [
        ("devices 0-1", {0: 16, 1: 32}),
        ("devices 1-2", {1: 32, 2: 16}),
    ]
    assert "devices 0-1 (x=2): at most 32 B on each" in str(view)
    assert "on 3 devices" in view.title


def test_free_devices_are_shown():
    sharding = mm.TaskSharding({mm.path("embed"): stages(4)[0], mm.path("blocks"): stages(4)[2]})
    model = nnx.eval_shape(lambda: Net(1, nnx.Rngs(0)))
    del model.drop  # its scalars would be everywhere
    mesh = make_mesh(stage=4, model=2)
    view = show_placement(model, sharding=sharding, mesh=mesh)
    assert [(box.name, box.devices) for box in view.submeshes][-1] == ("free", (2, 3, 6, 7))
    assert "free    devices 2-3, 6-7: nothing" in str(view)
    assert "nothing" in texts(view.figure)
    with mesh:
        assert str(show_placement(model, sharding=sharding)) == str(view)


def test_devices_that_the_mesh_leaves_idle_are_named():
    """In the text of a placement, and in the table of devices."""
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",))
    placement = mm.TaskSharding({mm.path(): (mm.Task("one", mesh_slice={"stage": 0}), P())})
    model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with mesh:
        assert str(show_placement(model, sharding=placement)).endswith("\nidle: devices 2-7")
        assert re.search(r"2-7 +│ idle +│ 0 B ", str(mm.tabulate(model, sharding=placement)))


def test_rules_for_either_path_of_what_is_shared():
    """As with mm.jit, no rule is in vain."""
    model = nnx.Dict(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    model["b"] = model["a"]
    with mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2]):
        first, second = (mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(2))
        rules = mm.TaskSharding({mm.path("a"): first, mm.path("b"): second})
        model = mm.jit(lambda model: model, out_shardings=rules)(model)
        assert "stage0" in str(mm.show_placement(model, sharding=rules))


def test_what_is_not_placed():
    class Both(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), abstract(1)

    view = show_placement(Both())
    assert view.title == "Both on 1 device, state 24 B; 5.1 KB not placed"
    assert [(box.name, box.parts) for box in view.submeshes] == [("device 0", (Part("a", 24, "a"),))]
    with pytest.raises(ValueError, match="no array of Net is on a device: give sharding="):
        show_placement(abstract())


def test_mistakes():
    mesh = make_mesh(stage=4, model=2)
    with pytest.raises(ValueError, match="needs a model"):
        show_placement()
    with pytest.raises(TypeError, match="a TaskSharding is not a model: give it as sharding="):
        show_placement(abstract(), placement(4))
    with pytest.raises(TypeError, match="mesh= is a MultiMesh"):
        show_placement(abstract(), sharding=placement(4), mesh=mesh.mesh)
    with pytest.raises(TypeError, match="sharding= is a TaskSharding"):
        show_placement(abstract(), sharding=P())
    with pytest.raises(TypeError, match="an NNX object is needed.*, not State$"):
        show_placement(nnx.state(abstract()))
    with pytest.raises(ValueError, match="no array of Module is on a device: there is none$"):
        show_placement(nnx.Module(), sharding=mm.TaskSharding({}))
    for memory in (0, -1.0, float("nan"), "80GB"):
        with pytest.raises(ValueError, match="memory= is the bytes that one device has"):
            show_placement(abstract(), sharding=placement(4), memory=memory, mesh=mesh)
    with pytest.raises(mm.PlacementError, match=r"no state is placed by path\('blocks', range\(6, 8\)\)"):
        show_placement(abstract(6), sharding=placement(4), mesh=mesh)
    with pytest.raises(mm.PlacementError, match=r"no filter places blocks\.8\.kernel"):
        show_placement(abstract(9), sharding=placement(4), mesh=mesh)


# ------------------------------------------------------------------------------------------- what it draws


def test_the_picture_has_what_the_text_has():
    view = four_by_two(memory=16_000)
    drawn = texts(view.figure)
    assert drawn[0] == view.title == "Net and Optimizer on 8 devices, state per device 9.2 KB of 16.0 KB"
    for box in view.submeshes:
        for expected in (box.name, box.axes, "devices 0-1", *(p.name for p in box.main_parts())):
            assert expected in drawn
    assert "9.2 KB on each, 58% of 16.0 KB" in drawn
    assert len([p for p in view.figure.axes[0].patches if isinstance(p, FancyBboxPatch)]) == 4


def test_bars_are_as_long_as_the_bytes():
    view = four_by_two(memory=16_000)
    for box, pieces in zip(view.submeshes, bars(view.figure), strict=True):
        assert [share for _, share in pieces] == pytest.approx([p.bytes / 16_000 for p in box.main_parts()])
        assert [colour for colour, _ in pieces].count(OTHER) == 1  # the smallest parts, together
    full = four_by_two()
    assert sum(share for _, share in bars(full.figure)[0]) == pytest.approx(1)
    assert sum(share for _, share in bars(full.figure)[1]) == pytest.approx(
        full.submeshes[1].most / full.submeshes[0].most
    )


def test_numbers_on_the_bar_are_those_of_the_list():
    view = large()
    figure = view.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    on_bar = [text for text in figure.axes[0].texts if text.get_gid() == "bar"]
    pieces = [p for p in rectangles(figure, BAR) if to_hex(p.get_facecolor()) != LIGHT.pale]
    listed = [part for box in view.submeshes for part in box.main_parts()]
    assert len(pieces) == len(listed) and len(on_bar) > len(listed) / 2
    for text in on_bar:
        extent = text.get_window_extent(renderer)
        frames = [piece.get_window_extent(renderer) for piece in pieces]
        (mine,) = [n for n, frame in enumerate(frames) if frame.contains(extent.x0, extent.y0)]
        assert extent.x1 < frames[mine].x1
        assert text.get_text() == bytes_text(listed[mine].bytes)


def test_what_a_step_adds_comes_from_its_plan():
    mesh = make_mesh(stage=2, model=2)
    with mesh:
        model = mm.jit(lambda: Net(4, nnx.Rngs(0)), out_shardings=placement(2))()

        def loss(model, x):
            for block in model.blocks:
                x = jnp.tanh(block(x))
            return x.mean()

        def step(model, x):
            return mm.microbatch(nnx.grad(loss), dim=0, size=2, argnum=1, schedule="1f1b")(model, x)

        plan = mm.plan(mm.jit(step), model, jnp.ones((8, 16)))
        view = show_placement(model, plan=plan, memory=10_000)
    for box, memory in zip(view.submeshes, plan.memory, strict=True):
        added = {part.name: part.bytes for part in box.step}
        for kind in ("gradients", "saved activations", "temporaries"):
            assert added.get(kind, 0) == memory.at_peak.get(kind, 0)
        assert box.peak == max(memory.total, box.most + sum(added.values()))
    assert "saved activations" in texts(view.figure)
    most = max(box.peak for box in view.submeshes)
    assert view.title == f"Net on 4 devices, peak per device {bytes_text(most)} of 10.0 KB"


def test_a_part_has_one_colour_everywhere():
    view = four_by_two()
    colours = {}
    for box, pieces in zip(view.submeshes, bars(view.figure)):
        for part, (colour, _) in zip(box.main_parts(), pieces):
            colours.setdefault(part.group, set()).add(colour)
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours) == 6


def test_parts_have_one_order_everywhere_and_weights_come_first():
    view = four_by_two()
    listed = [[part for part in box.main_parts() if part.group] for box in view.submeshes]
    for parts in listed:
        assert [part.kind for part in parts] == sorted((part.kind for part in parts), reverse=True)
        for others in listed:
            both = {part.group for part in parts} & {part.group for part in others}
            assert [p.group for p in parts if p.group in both] == [p.group for p in others if p.group in both]


def test_a_kind_of_memory_has_its_own_colours():
    weights, state = (
        [memory_colour(kind, n, 2) for n in range(2)] for kind in ("weights", "optimizer state")
    )
    assert [colour for colour, _ in bars(large().figure)[0]] == [weights[0], *state, weights[1]]


def test_too_much_is_red():
    view = four_by_two(memory=8_000)
    assert "stage0  devices 0-1 (model=2): 9.2 KB on each, 1.2 KB over 8.0 KB" in str(view)
    first, *others = bars(view.figure)
    assert all(is_red(colour) for colour, _ in first if colour != OTHER)
    assert not any(is_red(colour) for pieces in others for colour, _ in pieces)
    assert sum(share for _, share in first) == pytest.approx(1)
    frames = [p for p in view.figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    assert [to_hex(p.get_edgecolor()) == LIMIT for p in frames] == [True, False, False, False]
    limit, *_ = view.figure.axes[0].lines  # where the memory ends
    bar = rectangles(view.figure, BAR)[0]
    share = (limit.get_xdata()[0] - bar.get_x()) / bar.get_width()
    assert share == pytest.approx(8_000 / view.submeshes[0].most)
    assert not four_by_two().figure.axes[0].lines


@pytest.mark.parametrize(
    "sizes, memory",
    grid([(1, 1), (4, 2), (16, 8), (3, 24), (64, 16)], [None, 8_000_000_000, 6_000_000_000], step=6),
)
def test_texts_neither_overlap_nor_leave_their_boxes(sizes, memory):
    stages, devices = sizes
    figure = large(stages, devices, memory).figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    title, *rest = (
        (t.get_text(), t.get_window_extent(renderer)) for t in figure.axes[0].texts if t.get_text()
    )
    frames = [p.get_window_extent(renderer) for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    assert title[1].x1 < figure.bbox.x1 and len(frames) == stages
    per_box = len(rest) // stages
    assert per_box >= 4
    for text, extent in rest:
        (frame,) = [f for f in frames if f.x0 < extent.x0 and extent.x1 < f.x1 and f.y0 < extent.y0 < f.y1]
        mine = [
            e
            for _, e in rest
            if e is not extent and frame.y0 < e.y0 < frame.y1 and frame.x0 < e.x0 < frame.x1
        ]
        assert not any(extent.overlaps(e) for e in mine), text
    squares = [p.get_window_extent(renderer) for p in rectangles(figure, 0.1)]
    assert len(squares) in (0, stages * devices)
    assert not any(extent.overlaps(square) for _, extent in rest for square in squares)


def test_long_names_are_shortened():
    names = "a task of a rather long name that goes on", "another part with a name that would not fit in"
    devices = tuple(range(0, 60, 3))
    box = Submesh(names[0], "data=2, model=10", devices, (Part(names[1], 5, "x"),), dict.fromkeys(devices, 5))
    figure = PlacementView(("A", "B"), (box, box), None, 0).figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    frame = next(p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)).get_window_extent(
        renderer
    )
    shown = {t.get_text(): t.get_window_extent(renderer) for t in figure.axes[0].texts[1:7]}
    assert all(extent.x1 < frame.x1 for extent in shown.values())
    assert sum("…" in text for text in shown) == 3
    assert not any(a is not b and a.overlaps(b) for a in shown.values() for b in shown.values())


def test_files(tmp_path):
    view = four_by_two()
    view.save(tmp_path / "placement.svg")
    view.save(tmp_path / "placement.PNG")
    assert b"</svg>" in (tmp_path / "placement.svg").read_bytes()
    image = matplotlib.image.imread(io.BytesIO((tmp_path / "placement.PNG").read_bytes()), format="png")
    width, height = view.figure.get_size_inches()
    assert width == WIDTH and image.shape[:2] == (int(height * 200), int(width * 200))
    first = (tmp_path / "placement.svg").read_bytes()
    four_by_two().save(str(tmp_path / "placement.svg"))
    assert (tmp_path / "placement.svg").read_bytes() == first
    with pytest.raises(ValueError, match=r"placement\.json: .* must end in \.svg, \.png, \.pdf"):
        view.save(tmp_path / "placement.json")


def test_a_notebook_shows_the_picture():
    view = four_by_two()
    bundle, _ = view._repr_mimebundle_()
    assert bundle["text/plain"] == str(view)
    assert "</svg>" in bundle["image/svg+xml"]


@pytest.mark.slow
def test_layers_that_are_divided_are_shown_where_their_pieces_are():
    config = LMConfig(layers=10, width=32, vocab=64, mlp=64, scan=True)
    model = nnx.eval_shape(lambda: LM(config, rngs=nnx.Rngs(0)))
    with mm.MultiMesh(axis_sizes=(4,), axis_names=("stage",)):
        placement = mm.pipeline_sharding(model, 4)
        planned = mm.show_placement(model, sharding=placement)
        placed = mm.jit(lambda: LM(config, rngs=nnx.Rngs(0)), out_shardings=placement)()
        assert str(mm.show_placement(placed)) == str(planned)
        table = str(mm.tabulate(placed))
    blocks = [part.bytes for box in planned.submeshes for part in box.parts if part.name == "blocks"]
    assert [box.name for box in planned.submeshes] == ["stage0", "stage1", "stage2", "stage3"]
    sizes = placement.rules[1][0].sizes
    assert [held / sum(blocks) for held in blocks] == pytest.approx([n / 10 for n in sizes])
    assert "stage0 … stage3 (4)" in table and "stage[" in table
