"""Timelines and loss curves, looked at through what matplotlib was told to draw."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection

from mmnnx.inspect import draw_loss, draw_timeline


@dataclasses.dataclass
class Event:
    mesh: str
    start: float
    end: float
    phase: str
    microbatch: int | None = None
    name: str = "fragment"


def pipeline(stages: int, microbatches: int) -> list[Event]:
    """All forwards, then all backwards, each a unit long, and a step of the optimizer."""
    last = stages + microbatches - 1
    forward = [
        Event(f"stage{s}", s + m, s + m + 1, "forward", m) for m in range(microbatches) for s in range(stages)
    ]
    backward = [
        Event(f"stage{s}", last + stages - 1 - s + m, last + stages - s + m, "backward", m)
        for m in range(microbatches)
        for s in range(stages)
    ]
    return forward + backward + [Event(f"stage{s}", 2 * last, 2 * last + 0.5, "none") for s in range(stages)]


def boxes(figure) -> list:
    collections = [c for c in figure.axes[0].collections if isinstance(c, PatchCollection)]
    return [path.get_extents() for c in collections for path in c.get_paths()]


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_event_is_a_box_where_and_when_it_ran():
    events = pipeline(2, 3)
    drawn = [(box.x0, box.x1, (box.y0 + box.y1) / 2) for box in boxes(draw_timeline(events))]
    ran = [(event.start, event.end, int(event.mesh[-1])) for event in events]
    np.testing.assert_allclose(sorted(np.round(drawn, 6).tolist()), sorted(ran))


def test_rows_are_named_after_meshes_from_the_top():
    axes = draw_timeline(pipeline(4, 8)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage0", "stage1", "stage2", "stage3"]
    bottom, top = axes.get_ylim()
    assert bottom > top


def test_rows_follow_the_pipeline_not_the_order_of_the_events():
    events = [*reversed(pipeline(3, 2)), Event("stage2", -1, 0, "none")]
    axes = draw_timeline(events).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage0", "stage1", "stage2"]


def test_phases_have_colours_of_their_own():
    collections = draw_timeline(pipeline(2, 2)).axes[0].collections
    assert len({tuple(c.get_facecolor()[0]) for c in collections}) == len(collections) == 3


def test_idle_time_is_told():
    figure = draw_timeline([Event("a", 0, 3, "forward", 0), Event("b", 3, 4, "forward", 0)])
    assert "idle (50%)" in [text.get_text() for text in figure.legends[0].texts]


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (16, 64)])
def test_every_microbatch_number_is_legible(stages, microbatches):
    figure = draw_timeline(pipeline(stages, microbatches))
    assert sorted(labels(figure)) == sorted(str(m) for m in range(microbatches) for _ in range(2 * stages))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)  # settles the layout
    for text in figure.axes[0].texts:
        assert text.get_fontsize() >= 5
        assert text.get_window_extent(renderer).width < 0.3 * figure.dpi  # narrower than the box around it


def test_times_need_not_start_at_zero():
    figure = draw_timeline([Event("a", 100.0, 101.0, "forward", 0), Event("a", 101.0, 103.0, "backward", 0)])
    assert figure.axes[0].get_xlim() == (0, 3)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no events"):
        draw_timeline([])


def test_losses_are_drawn_in_bits():
    rows = [{"step": 0, "val_bits_per_byte": 8.0}]
    rows += [{"step": i, "loss": math.log(2) * (8 - i), "tokens_per_second": 1.0} for i in range(1, 4)]
    rows += [{"step": 3, "val_bits_per_byte": 5.5}]
    train, valid = draw_loss(rows).axes[0].lines
    assert train.get_ydata() == pytest.approx([7, 6, 5])
    assert list(valid.get_xdata()) == [0, 3] and list(valid.get_ydata()) == [8.0, 5.5]
