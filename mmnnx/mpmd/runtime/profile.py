"""A program runs and is measured: every fragment and transfer, the step, and the bytes of live arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.ir.instructions import Call, Control, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Costs, Profile
from mmnnx.mpmd.runtime.live_bytes import LiveBytes
from mmnnx.mpmd.runtime.steps import Step, make_step
from mmnnx.mpmd.runtime.whiles import find_jumps, walk

_profiles: ContextVar[list[Profile] | None] = ContextVar("mmnnx_profiles", default=None)


@contextlib.contextmanager
def measuring() -> Iterator[list[Profile]]:
    """Programs that run inside are measured; yields the list that their profiles are added to."""
    profiles: list[Profile] = []
    token = _profiles.set(profiles)
    try:
        yield profiles
    finally:
        _profiles.reset(token)


def is_measured() -> bool:
    """Whether programs are being measured."""
    return _profiles.get() is not None


def measurer(compiled: Compiled) -> Callable[[list[jax.Array]], Sequence[jax.Array]]:
    """As `dispatch.runner`, of a program in one process that is measured while it runs.

    It runs three times, twice on copies of its inputs; the last two are measured.
    """
    program = compiled.program
    steps = [make_step(compiled, [n], frozenset()) for n in range(len(program.instructions))]

    def run(arrays: list[jax.Array]) -> Sequence[jax.Array]:
        for _ in range(2):  # the first run is slower
            seconds = _time_of_step(program, steps, [jnp.copy(a) for a in arrays])
        buffers = _fill(program, jax.block_until_ready(arrays))
        live = LiveBytes(program, buffers)
        costs = _run_one_at_a_time(program, steps, buffers, live)
        profiles = _profiles.get()
        if profiles is not None:
            timeline = dataclasses.replace(program.simulate(costs), unit="s")
            names = [name for name in program.names.values() if name in live.peak]
            peak, saved = ({name: most[name] for name in names} for most in (live.peak, live.saved_peak))
            profiles.append(Profile(seconds, costs, timeline, peak, saved))
        return [buffers[s] for held in program.outputs for s in held]

    return run


def _fill(program: Program, arrays: list[jax.Array]) -> list[Any]:
    """Buffers with the inputs in them; empties the list."""
    buffers: list[Any] = [None] * len(program.values)
    for s in reversed(list(program.inputs)):
        buffers[s] = arrays.pop()
    return buffers


def _time_of_step(program: Program, steps: Sequence[Step], arrays: list[jax.Array]) -> float:
    """The seconds that a program takes as it runs, waiting for nothing but its end."""
    jax.block_until_ready(arrays)
    began = time.perf_counter()
    buffers = _fill(program, arrays)
    for n in _order(program, buffers):
        execute, inputs, outputs, frees = steps[n]
        for s, array in zip(outputs, execute(*[buffers[s] for s in inputs])):
            buffers[s] = array
        for s in frees:
            buffers[s] = None
    jax.block_until_ready([a for a in buffers if a is not None and not a.is_deleted()])
    return time.perf_counter() - began


def _order(program: Program, buffers: list[Any]) -> Iterator[int]:
    """The numbers of the instructions in the order in which they run."""
    jumps = find_jumps(program.instructions, {s: s for s in range(len(buffers))})
    return walk(len(program.instructions), jumps, buffers)


def _run_one_at_a_time(program: Program, steps: Sequence[Step], buffers: list[Any], live: LiveBytes) -> Costs:
    """Runs a program over its buffers, waits for each instruction, and returns what they cost."""
    starts: list[float] = []
    calls: defaultdict[str, list[float]] = defaultdict(list)
    transfers: defaultdict[int, list[float]] = defaultdict(list)
    moved: Control | None = None
    for n in _order(program, buffers):
        i, (execute, inputs, outputs, frees) = program.instructions[n], steps[n]
        if moved is not None:
            live.move(moved.inputs, moved.outputs)
        moved = i if isinstance(i, Control) and i.kind == "repeat" else None
        began = time.perf_counter()
        made = execute(*[buffers[s] for s in inputs])
        starts.append(time.perf_counter() - began)
        jax.block_until_ready(made)
        took = time.perf_counter() - began
        if isinstance(i, Call):
            calls[program.labels[i.fragment]].append(took)
        elif isinstance(i, Transfer):
            transfers[i.nbytes].append(took)
        for s, array in zip(outputs, made):
            buffers[s] = array
        live.after(inputs, outputs)
        for s in frees:
            live.drop(s)
            buffers[s] = None
    latency, bandwidth = _line({n: statistics.median(times) for n, times in transfers.items()})
    return Costs(
        # What a while did not come to took no time.
        {label: statistics.median(calls[label] or [0.0]) for label in program.labels.values()},
        latency,
        bandwidth,
        statistics.median(starts or [0.0]),
    )


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """(latency, bandwidth) of the line through times by bytes; a flat one where times do not grow."""
    if len(times) < 2:
        return next(iter(times.values()), 0.0), math.inf
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    if slope <= 0 or start < 0:
        return statistics.median(times.values()), math.inf
    return float(start), float(1 / slope)
