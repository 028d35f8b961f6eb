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

from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Costs, Profile

# (function, buffers it reads, buffers it fills, buffers that are dropped then), for each instruction.
Step = tuple[Callable[..., Sequence[jax.Array]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


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


def measure(program: Program, steps: Sequence[Step], arrays: list[jax.Array]) -> list[Any]:
    """Runs a program three times, twice on copies of its inputs, and measures the last two.

    Args:
      program: what runs.
      steps: how.
      arrays: its inputs, in the order of `program.inputs`; emptied.

    Returns:
      The array in each buffer after the last run, None where it was dropped.
    """
    for _ in range(2):  # the first run is slower
        copies = jax.block_until_ready([jnp.copy(a) for a in arrays])
        began = time.perf_counter()
        buffers = _fill(program, copies)
        for execute, inputs, outputs, frees in steps:
            for s, array in zip(outputs, execute(*[buffers[s] for s in inputs])):
                buffers[s] = array
            for s in frees:
                buffers[s] = None
        jax.block_until_ready([a for a in buffers if a is not None and not a.is_deleted()])
        seconds = time.perf_counter() - began
    buffers = _fill(program, jax.block_until_ready(arrays))
    live = _Live(program, buffers)
    starts: list[float] = []
    calls: defaultdict[str, list[float]] = defaultdict(list)
    transfers: defaultdict[int, list[float]] = defaultdict(list)
    for i, (execute, inputs, outputs, frees) in zip(program.instructions, steps):
        began = time.perf_counter()
        made = execute(*[buffers[s] for s in inputs])
        starts.append(time.perf_counter() - began)
        jax.block_until_ready(made)
        took = time.perf_counter() - began
        (calls[program.labels[i.fragment]] if isinstance(i, Call) else transfers[i.nbytes]).append(took)
        for s, array in zip(outputs, made):
            buffers[s] = array
        live.after(inputs, outputs)
        for s in frees:
            live.drop(s)
            buffers[s] = None
    latency, bandwidth = _line({n: statistics.median(times) for n, times in transfers.items()})
    costs = Costs(
        {label: statistics.median(times) for label, times in calls.items()},
        latency,
        bandwidth,
        statistics.median(starts or [0.0]),
    )
    profiles = _profiles.get()
    if profiles is not None:
        timeline = dataclasses.replace(program.simulate(costs), unit="s")
        names = [name for name in program.names.values() if name in live.peak]
        peak, residuals = ({name: most[name] for name in names} for most in (live.peak, live.residual_peak))
        profiles.append(Profile(seconds, costs, timeline, peak, residuals))
    return buffers


def _fill(program: Program, arrays: list[jax.Array]) -> list[Any]:
    buffers: list[Any] = [None] * len(program.values)
    for s in reversed(list(program.inputs)):
        buffers[s] = arrays.pop()
    return buffers


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """(latency, bandwidth) of the line through times by bytes; a flat one where times do not grow."""
    if len(times) < 2:
        return next(iter(times.values()), 0.0), math.inf
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    if slope <= 0 or start < 0:
        return statistics.median(times.values()), math.inf
    return float(start), float(1 / slope)


class _Live:
    """Bytes of the arrays in buffers, by mesh."""

    def __init__(self, program: Program, buffers: list[Any]):
        self.program, self.buffers = program, buffers
        self.bytes: dict[int, int] = {}
        self.now: defaultdict[str, int] = defaultdict(int)
        self.peak: defaultdict[str, int] = defaultdict(int)
        self.residuals: defaultdict[str, int] = defaultdict(int)
        self.residual_peak: defaultdict[str, int] = defaultdict(int)
        self.after((), program.inputs)

    def after(self, inputs: Sequence[int], outputs: Any) -> None:
        """Counts what an instruction made; inputs whose buffers its results took over are gone."""
        for s in inputs:
            if self.buffers[s] is not None and self.buffers[s].is_deleted():
                self.drop(s)
        for s in outputs:
            array = self.buffers[s]
            shard = array.sharding.shard_shape(array.shape)
            self.bytes[s] = math.prod(shard) * array.dtype.itemsize * array.sharding.num_devices
            self._add(s, self.bytes[s])

    def drop(self, s: int) -> None:
        self._add(s, -self.bytes.pop(s, 0))

    def _add(self, s: int, change: int) -> None:
        name = self.program.names[self.program.values[s][1]]
        self.now[name] += change
        self.peak[name] = max(self.peak[name], self.now[name])
        if s in self.program.residuals:
            self.residuals[name] += change
            self.residual_peak[name] = max(self.residual_peak[name], self.residuals[name])
