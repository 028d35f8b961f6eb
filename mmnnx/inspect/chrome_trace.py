"""Timelines in the Chrome trace event format, which https://ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format", Google, 2016, of which these are complete ("X") and metadata ("M") events.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from mmnnx.inspect.phase_styles import STYLES
from mmnnx.mpmd.ir.timeline import Event, Timeline

MICROSECONDS = {"s": 1e6, "units": 1e3}
"""Microseconds in a unit of time; a unit of costs is shown as a millisecond."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace: a process with a thread for each mesh, and one with a thread for each pair that transfers.

    Events of one mesh that overlap are on several threads of its name. Times are in microseconds; a unit of
    cost is shown as a millisecond.

    Example:
      >>> trace = chrome_trace(program.simulate())  # json.dump writes it to a file
      >>> sorted(trace)
      ['displayTimeUnit', 'otherData', 'traceEvents']
    """
    factor = MICROSECONDS[timeline.unit]
    entries: list[dict[str, Any]] = []
    processes = (("meshes", timeline.events), ("transfers", timeline.transfers))
    for pid, (process, events) in enumerate(processes, 1):
        if not events:
            continue
        entries.append(_metadata("process_name", pid, 0, name=process))
        names = list(dict.fromkeys(e.mesh for e in events))
        tid = 0
        for mesh in names:
            for lane in _lanes(e for e in events if e.mesh == mesh):
                tid += 1
                entries.append(_metadata("thread_name", pid, tid, name=mesh))
                entries.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
                entries += [_slice(e, pid, tid, factor) for e in lane]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {
            "unit": timeline.unit,
            "period": timeline.period,
            "bubble": timeline.bubble,
            "peak_bytes": dict(timeline.peak_bytes),
        },
    }


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(e: Event, pid: int, tid: int, factor: float) -> dict[str, Any]:
    # Perfetto colours slices by name, ignoring numbers in it: each phase has one colour.
    name = e.phase if e.microbatch is None else f"{e.phase} {e.microbatch}"
    return {
        "ph": "X",
        "name": name,
        "cat": e.phase,
        "ts": e.start * factor,
        "dur": (e.end - e.start) * factor,
        "pid": pid,
        "tid": tid,
        "cname": STYLES[e.phase].trace_colour,
        "args": {"fragment": e.name, "phase": e.phase, "stage": e.stage, "microbatch": e.microbatch},
    }


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """The fewest lists in which no events overlap; viewers draw overlapping events of a thread as nested."""
    lanes: list[list[Event]] = []
    ends: list[tuple[float, int]] = []  # (end of the last event, lane), as a heap
    for e in sorted(events, key=lambda e: (e.start, e.end)):
        if ends and ends[0][0] <= e.start:
            lane = heapq.heappop(ends)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(e)
        heapq.heappush(ends, (e.end, lane))
    return lanes
