"""Schedules side by side."""

from __future__ import annotations

import dataclasses

import pytest

from mmnnx.inspect.schedules import by_name, from_csv
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.schedule import Action, Stages, get_schedule, schedule_names, simulate, write_schedule

LAYOUTS = {
    "interleaved-1f1b": Stages.chain([0, 1, 2] * 2),
    "interleaved-zero-bubble": Stages.chain([0, 1, 2] * 2),
    "looped-bfs": Stages.chain([0, 1, 2] * 2),
    "zbv": Stages.chain([0, 1, 2, 2, 1, 0]),
    "dualpipe-v": Stages.chain([0, 1, 2, 2, 1, 0]),
}
COSTS = {"forward": 1.0, "backward": 2.5, "backward-input": 1.5, "backward-weight": 1.0}


@pytest.mark.parametrize("name", schedule_names())
def test_is_what_simulate_says(name):
    found = by_name(name, 3, 7, 2, COSTS)
    stages = LAYOUTS.get(name, Stages.chain(range(3)))
    table = get_schedule(name).table(stages, 7)
    timeline = simulate(table, stages, COSTS)
    assert (found.stages, found.table) == (stages, table)
    assert found.timeline == dataclasses.replace(timeline, schedule=name)
    assert found.stages_per_mesh == stages.num_stages // 3
    assert found.period == pytest.approx(timeline.period)
    held = timeline.in_flight()
    assert found.memory == tuple(held[f"mesh{mesh}"] / found.stages_per_mesh for mesh in range(3))


def test_equal_hardware():
    """Whatever the schedule, a mesh computes the same for as long."""
    busy = {}
    for name in schedule_names():
        found = by_name(name, 4, 8, 2, COSTS)
        rows = found.timeline.by_mesh()
        busy[name] = [round(sum(e.end - e.start for e in rows[mesh]), 6) for mesh in sorted(rows)]
    assert all(times == [8 * 3.5] * 4 for times in busy.values())


def test_interleave_is_for_rounds_and_a_vee_has_two():
    assert by_name("interleaved-1f1b", 4, 8, 3, COSTS).stages == Stages.chain([*range(4)] * 3)
    assert by_name("zbv", 4, 8, 3, COSTS).stages_per_mesh == 2
    assert by_name("1f1b", 4, 8, 3, COSTS).stages_per_mesh == 1


def test_the_reason_is_not_about_the_layout_that_does_not_suit_it():
    with pytest.raises(ValueError, match="microbatches") as error:
        by_name("dualpipe-v", 4, 3, 2, COSTS)
    assert "in a V" not in str(error.value) and "go round" not in str(error.value)
    with pytest.raises(ValueError, match="unknown schedule '2f2b'; there are '1f1b'"):
        by_name("2f2b", 4, 8, 2, COSTS)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"])
def test_csv_knows_the_stages(name, tmp_path):
    written = by_name(name, 3, 7, 2, COSTS)
    write_schedule(written.table, tmp_path / "it.csv")
    read = from_csv(tmp_path / "it.csv", None, None, COSTS)
    assert (read.stages, read.table) == (written.stages, written.table)
    for found in (read, from_csv(tmp_path / "it.csv", 3, 7, COSTS)):
        assert found.timeline.events == written.timeline.events


def one_each(*stages: int) -> list[Action]:
    return [Action(s, phase, 0) for phase in ("forward", "backward") for s in stages]


@pytest.mark.parametrize(
    ("table", "sizes", "says"),
    [
        ([], (None, None), "no actions"),
        ([one_each(0), one_each(1)], (3, None), "2 rows, one for each mesh; --stages is 3"),
        ([one_each(0), one_each(1)], (2, 2), "forward of microbatch 1 on stage 0 is missing"),
        ([one_each(0), one_each(2)], (None, None), "there is a stage 2, but no stage 1"),
        ([one_each(0, 1), one_each(1)], (None, None), "forward of microbatch 0 on stage 1 is there 2 times"),
        ([one_each(0), one_each(1)[:1]], (None, None), "backward of microbatch 0 on stage 1 is missing"),
        (
            [one_each(0)[::-1], one_each(1)],
            (None, None),
            "wait for each other.*: backward of microbatch 0 on stage 0",
        ),
    ],
)
def test_csv_that_is_no_schedule(table, sizes, says, tmp_path):
    write_schedule(table, tmp_path / "it.csv")
    with pytest.raises(ValueError, match=says) as error:
        from_csv(tmp_path / "it.csv", *sizes, UNIT_COSTS)
    assert "it.csv" in str(error.value)
