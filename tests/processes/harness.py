"""Starts the processes of a program on this machine, and leaves none behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.environment import environment

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    script: str, count: int, devices: int | Sequence[int], *args: str, without: Sequence[int] = ()
) -> list[subprocess.Popen[str]]:
    """Starts `count` processes of `tests/processes/SCRIPT`, each with as many CPU devices or with its own.

    Each gets the arguments COORDINATOR, COUNT, its number, and `args`. Those `without` which it goes are not
    started.
    """
    each = [devices] * count if isinstance(devices, int) else devices
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(Path(__file__).parent / script), coordinator, str(count)]
    return [
        subprocess.Popen(
            [*command, str(n), *args],
            env=environment() | {"JAX_NUM_CPU_DEVICES": str(each[n]), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for n in range(count)
        if n not in without
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str]]:
    """(exit status, what it printed) of each process; what is still there after `timeout` s is killed."""
    end = time.monotonic() + timeout
    results = []
    try:
        for process in processes:
            try:
                printed, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                printed = process.communicate()[0] + f"\n(killed after {timeout:.0f} s)"
            results.append((process.returncode, printed))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def run(script: str, count: int, devices: int | Sequence[int], *args: str, timeout: float = 180) -> list[str]:
    """What each process printed; AssertionError with all of it unless all end well."""
    results = finish(start(script, count, devices, *args), timeout)
    texts = "\n".join(
        f"--- process {n} ended with {status}\n{text}" for n, (status, text) in enumerate(results)
    )
    assert all(status == 0 for status, _ in results), texts
    return [text for _, text in results]
