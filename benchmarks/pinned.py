"""Processes on this machine that compute together, each pinned to a core of its own.

A process pinned to one core is a one-core device: XLA starts as many threads as it may use cores. Every
process holds what `make(*args)` made there, and answers questions about it:

    with Pinned(4, make, options) as processes:
        answers = processes.ask(function, 1, 2)        # function(held, 1, 2) in each, at the same time

Calls and results are pickled: `make` and `function` are functions of a module, not lambdas.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import mmnnx as mm

CONTEXT = multiprocessing.get_context("spawn")


class ProcessError(RuntimeError):
    """A process raised, died or did not answer in time."""


class Pinned:
    """Some processes of `mm.initialize`, one CPU device and one core each; none is left when it is closed.

    Args:
      count: how many.
      make: called in each process when all have found each other; what it returns stays there.
      args: of `make`.
      timeout: seconds that they have for the start, and for each answer.

    Raises:
      ProcessError: if this machine has fewer cores, or a process fails.
    """

    def __init__(self, count: int, make: Callable[..., Any], *args: Any, timeout: float = 120.0):
        cores = free_cores()
        if len(cores) < count:
            raise ProcessError(f"{count} processes need a core each, and this one may use {len(cores)}")
        self.timeout = timeout
        coordinator = f"127.0.0.1:{_free_port()}"
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        mine = os.sched_getaffinity(0)
        try:
            for index, core in zip(range(count), cores):
                os.sched_setaffinity(0, {core})  # inherited: no thread of the process ever runs elsewhere
                ours, theirs = CONTEXT.Pipe()
                serve = CONTEXT.Process(
                    target=_serve, args=(theirs, coordinator, count, index, make, args), daemon=True
                )
                serve.start()
                theirs.close()  # so that it reads as ended when the process is gone
                self.pipes.append(ours)
                self.processes.append(serve)
        finally:
            os.sched_setaffinity(0, mine)

    def __enter__(self) -> Pinned:
        try:
            self._answers("the start")
        except BaseException:
            self._end(0)
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            for pipe in self.pipes:
                pipe.send(None)
        self._end(20 if kind is None else 0)

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(held, *args)` returns in each process.

        Raises:
          ProcessError: with what the first to fail said, or which ones did not answer.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        return self._answers(function.__name__)

    def _answers(self, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        end = time.monotonic() + self.timeout
        while len(answers) < len(self.pipes):
            waiting = {pipe: n for n, pipe in enumerate(self.pipes) if n not in answers}
            left = max(0.0, end - time.monotonic())
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), left)
            if not ready:
                raise ProcessError(
                    f"{what}: processes {sorted(waiting.values())} did not answer in {self.timeout:.0f} s"
                )
            for pipe in ready:
                n = waiting[pipe]
                try:
                    good, answers[n] = pipe.recv()
                except EOFError:
                    self.processes[n].join(5)
                    status = self.processes[n].exitcode
                    raise ProcessError(f"{what}: process {n} ended with status {status}") from None
                if not good:
                    raise ProcessError(f"{what}: process {n} raised\n{answers[n]}")
        return [answers[n] for n in range(len(self.pipes))]

    def _end(self, patience: float) -> None:
        end = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()


def free_cores() -> list[int]:
    """The CPUs that this process may use, one of each physical core before the second of any.

    Raises:
      ProcessError: where processes cannot be pinned.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ProcessError("processes can be pinned to cores on Linux alone")
    seen: dict[str, int] = {}

    def turn(cpu: int) -> int:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        seen[core] = seen.get(core, -1) + 1
        return seen[core]

    return [cpu for _, cpu in sorted((turn(cpu), cpu) for cpu in sorted(os.sched_getaffinity(0)))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe: Any, coordinator: str, count: int, index: int, make: Callable[..., Any], args: Any) -> None:
    os.dup2(2, 1)  # libraries of JAX print to the standard output
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        mm.initialize(coordinator, count, index)
        held = make(*args)
        pipe.send((True, None))
        while (request := pipe.recv()) is not None:
            function, more = request
            pipe.send((True, function(held, *more)))
    except (EOFError, KeyboardInterrupt):
        pass  # the process that started this one is gone
    except BaseException:
        pipe.send((False, traceback.format_exc()))
