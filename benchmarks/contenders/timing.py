"""Contenders take turns, against the clock; what they compute is compared first."""

from __future__ import annotations

import dataclasses
import os
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from contenders.contender import Contender, compare

UNTIMED = 3
"""Steps of each contender before the timed ones. Their losses are compared."""


@dataclasses.dataclass
class Timing:
    """What the steps of one contender took: seconds, one entry for each timed step, unless said otherwise.

    Attributes:
      total: until all that the step writes was ready.
      dispatch: until the call returned.
      host: CPU time of the dispatching thread until then.
      busy: CPU time of all threads together.
      losses: of every step, also those that were not timed.
      programs: how many XLA programs were compiled for it.
      first: the first step: tracing and compiling too.
    """

    total: list[float] = dataclasses.field(default_factory=list)
    dispatch: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)
    busy: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    programs: int = 0
    first: float = 0.0

    def median(self, name: str) -> float:
        """Of `total`, `dispatch`, `host` or `busy`, in milliseconds."""
        return 1e3 * float(np.median(getattr(self, name)))

    @property
    def cores(self) -> float:
        """How many cores were busy at a time."""
        return float(np.median(np.divide(self.busy, self.total)))

    def over(self, other: Timing) -> float:
        """This one's time over that of another: the median of the ratios within a round."""
        return float(np.median(np.divide(self.total, other.total)))


def measure(contenders: Sequence[Contender], batch: Any, rounds: int) -> list[Timing]:
    """Takes `UNTIMED` steps of each contender and then `rounds` timed ones of each, in changing order.

    Each timed step comes right after another one of the same contender: what it finds in the caches, it left
    there itself.

    Raises:
      AssertionError: if they do not agree on the gradients of the first step, or the losses of the untimed.
    """
    compiled: list[str] = []

    def count(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    timings = [Timing() for _ in contenders]
    gradients: dict[str, Any] = {}
    for contender, timing in zip(contenders, timings):
        before, start = len(compiled), time.perf_counter()
        timing.losses.append(float(contender.step(batch)))
        timing.first = time.perf_counter() - start
        found = jax.device_get(contender.moment())
        gradients = gradients or found
        compare(contender.name, found, gradients)
        timing.losses += [float(contender.step(batch)) for _ in range(UNTIMED - 1)]
        timing.programs = len(compiled) - before
        np.testing.assert_allclose(
            timing.losses, timings[0].losses[:UNTIMED], rtol=1e-3, err_msg=f"losses of {contender.name}"
        )
    pairs = list(zip(contenders, timings))
    for turn in range(rounds):
        for contender, timing in random.Random(turn).sample(pairs, len(pairs)):
            jax.block_until_ready((contender.step(batch), contender.state()))
            _time_step(contender, timing, batch)
    return timings


def _time_step(contender: Contender, timing: Timing, batch: Any) -> None:
    busy, host, start = time.process_time(), time.thread_time(), time.perf_counter()
    loss = contender.step(batch)
    returned, host = time.perf_counter(), time.thread_time() - host
    jax.block_until_ready((loss, contender.state()))
    end, busy = time.perf_counter(), time.process_time() - busy
    timing.total.append(end - start)
    timing.dispatch.append(returned - start)
    timing.host.append(host)
    timing.busy.append(busy)
    timing.losses.append(float(loss))


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """What the processor calls itself."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
