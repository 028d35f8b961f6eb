"""`mm.timeline`: what it takes, and the files it writes."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from mmnnx.inspect import TimelineView, chrome_trace, timeline
from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Event, Timeline

SIMULATED = by_name("interleaved-1f1b", 2, 4, 2, UNIT_COSTS).timeline
MEASURED = Timeline(
    (
        Event("left", 10.0, 10.5, "forward", 0, "encode", 0),
        Event("right", 11.0, 11.25, "forward", 0, "decode", 1),
        Event("right", 11.25, 11.25, "none", None, "update"),
    ),
    (
        Event("left -> right", 10.5, 10.9, "transfer", 0, "activations"),
        Event("left -> right", 10.6, 11.0, "transfer", 0, "mask"),
    ),
    {"left": 1 << 20, "right": 1 << 21},
    unit="s",
)


def test_takes_programs_profiles_and_timelines():
    program = SimpleNamespace(simulate=lambda: SIMULATED)
    profile = SimpleNamespace(timeline=MEASURED, seconds=1.5, simulate=lambda: SIMULATED)
    assert timeline(program).timeline is SIMULATED
    assert timeline(profile).timeline is MEASURED
    both = timeline(program, profile, title="step")
    titles = [axes.get_title(loc="left") for axes in both.figure.axes]
    assert titles == [
        "step, simulated: interleaved-1f1b, bubble 11.1%, steady-state step time 13.5 units",
        "step, measured part by part (a whole step: 1.5 s): bubble 25.0%, steady-state step time 500 ms",
    ]
    assert both.trace() == chrome_trace(MEASURED)
    assert [line for line in str(both).splitlines() if line.startswith("step, ")] == [
        title.partition(":")[0] if n == 0 else "step, measured part by part (a whole step: 1.5 s)"
        for n, title in enumerate(titles)
    ]
    assert timeline(SIMULATED, title="step") == TimelineView(SIMULATED, "step")


def test_refuses_anything_else():
    with pytest.raises(TypeError, match=r"not function.*f\.program\(\*args\)"):
        timeline(lambda x: x)
    with pytest.raises(TypeError, match="measured= is a profile"):
        timeline(SIMULATED, SIMULATED)
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline(Timeline(()))


def test_saves_pictures(tmp_path):
    view = timeline(SIMULATED, title="interleaved")
    for suffix in ("svg", "png", "pdf", "PNG"):
        view.save(tmp_path / f"step.{suffix}")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "step.PNG").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "step.pdf").read_bytes().startswith(b"%PDF")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) >= len(SIMULATED.events)


def test_the_same_timeline_gives_the_same_file(tmp_path):
    for suffix in ("svg", "pdf"):
        for name in ("one", "two"):
            timeline(SIMULATED).save(tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_refuses_other_kinds_of_file(tmp_path):
    with pytest.raises(ValueError, match=r"step\.bmp.*\.svg, \.png, \.pdf.*\.json"):
        timeline(SIMULATED).save(tmp_path / "step.bmp")
    assert not list(tmp_path.iterdir())


def test_shows_itself_in_a_notebook():
    few, _ = timeline(SIMULATED)._repr_mimebundle_()
    assert set(few) == {"text/plain", "image/svg+xml"} and "<svg" in few["image/svg+xml"]
    assert few["text/plain"] == str(timeline(SIMULATED)) == repr(timeline(SIMULATED))
    view = timeline(by_name("1f1b", 16, 64, 2, UNIT_COSTS).timeline)
    many, metadata = view._repr_mimebundle_()
    assert set(many) == {"text/plain", "image/png"} and many["image/png"].startswith(b"\x89PNG")
    # As wide as the SVG is, so that text has one size.
    assert metadata == {"image/png": {"width": 768}} and 'width="576pt"' in few["image/svg+xml"]


@pytest.mark.parametrize(("drawn", "factor"), [(SIMULATED, 1e3), (MEASURED, 1e6)])
def test_a_trace_has_every_event_once_at_its_time(drawn, factor, tmp_path):
    timeline(drawn).save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(drawn)
    processes = names(trace, "process_name")
    threads = names(trace, "thread_name")
    found = [
        (
            processes[e["pid"], 0],
            threads[e["pid"], e["tid"]],
            *(e["args"][key] for key in ("phase", "microbatch", "fragment", "stage")),
            pytest.approx(e["ts"] / factor),
            pytest.approx((e["ts"] + e["dur"]) / factor),
        )
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    expected = [
        (process, e.mesh, e.phase, e.microbatch, e.name, e.stage, e.start, e.end)
        for process, events in (("meshes", drawn.events), ("transfers", drawn.transfers))
        for e in events
    ]
    assert len(found) == len(expected)
    assert all(e in found for e in expected)


def names(trace: dict, kind: str) -> dict[tuple[int, int], str]:
    entries = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == kind]
    assert len({(e["pid"], e["tid"]) for e in entries}) == len(entries)
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in entries}


def test_a_trace_says_what_the_timeline_knows():
    data = chrome_trace(MEASURED)["otherData"]
    assert data["unit"] == "s" and data["period"] == 0.5 and data["bubble"] == MEASURED.bubble
    assert data["peak_bytes"] == {"left": 1 << 20, "right": 1 << 21}


def test_slices_of_a_thread_never_overlap():
    """Transfers may be under way at once; viewers take slices that overlap on a thread for nested calls."""
    trace = chrome_trace(MEASURED)
    threads = defaultdict(list)
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) == 4  # two meshes, and the transfers between them, two at a time
    for slices in threads.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(slices)))
