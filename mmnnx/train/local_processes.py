"""The processes of a run on this machine: started, watched, and ended together.

The process that starts them uses no JAX. Their standard input is a pipe from it: when it ends, in any way,
they read the end of the pipe and end too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from mmnnx.exit_status import DIVERGED, FAILED, MISTAKE
from mmnnx.output import current
from mmnnx.train.accelerators import share_accelerators
from mmnnx.train.config import TrainConfig
from mmnnx.train.run_folder import RunFolder

EXPECTED_STATUSES = {0, MISTAKE, DIVERGED, 128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit statuses that all processes of a run agree on; the first process has reported why."""

GRACE_PERIOD = 5.0
"""Seconds that the others have to report where they are and to end, once a process has failed."""

LAUNCHER = "MMNNX_LAUNCHER"  # the process id of what started this process

Process = subprocess.Popen[str]


def supervise(options: Sequence[str], config: TrainConfig, print_error: Callable[[str], None]) -> int:
    """Runs `mmnnx train` with these options in ``config.processes`` processes on this machine.

    The first one writes to the terminal as a single process would; errors of the others are printed with
    their number in front. Ctrl-C and SIGTERM are forwarded; a second one kills them all. If one fails, the
    others end within `GRACE_PERIOD` seconds.

    Returns the exit status that they agree on, or 1 if one failed, which is reported by `print_error`.

    Raises UserError for accelerators that cannot be divided.
    """
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(config.processes),
        LAUNCHER: str(os.getpid()),
    }
    shares = share_accelerators(config.devices, config.processes)
    processes: list[Process] = []
    received: list[signal.Signals] = []
    with contextlib.ExitStack() as stack, _forwarding_signals(processes, received):
        for number, share in enumerate(shares):
            own = environment | share | {"JAX_PROCESS_ID": str(number)}
            processes.append(stack.enter_context(_process(number, options, own)))
        number, status = _wait(processes)
    if received and status != 0:  # else it came when all steps were taken
        if status not in EXPECTED_STATUSES:
            print_error("stopped at once; what was not in a checkpoint is lost")
        return 128 + received[0]
    if status in EXPECTED_STATUSES:
        return status
    folder = RunFolder(config.folder(), config.checkpoints)
    left = (
        "there was no checkpoint yet"
        if folder.saved is None
        else f"the checkpoint of step {folder.saved} is kept; to go on: mmnnx train --resume --out "
        f"{shlex.quote(str(folder.path))}"
    )
    pid = processes[number].pid
    print_error(f"process {number} (process id {pid}) {_exit_text(status)}; ended the others, {left}")
    return FAILED


def follow_launcher() -> None:
    """Ends this process when the one that started it ends, if `supervise` started it."""

    def wait() -> None:
        os.read(0, 1)  # returns only at the end of the pipe
        os.write(2, b"mmnnx: the process that started this one has ended, and so does this one\n")
        os._exit(1)

    if LAUNCHER in os.environ:
        threading.Thread(target=wait, daemon=True).start()


def free_port() -> int:
    """A free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _process(number: int, options: Sequence[str], environment: dict[str, str]) -> Iterator[Process]:
    """Starts one process, and kills it at the end.

    It is in a process group of its own: Ctrl-C on the terminal reaches it only through `supervise`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mmnnx", *current.get().arguments, "train", *options],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=None if number == 0 else subprocess.DEVNULL,
        stderr=None if number == 0 else subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )
    relay = threading.Thread(target=_relay, args=(number, process.stderr or ()))
    relay.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        relay.join()


def _relay(number: int, lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(f"process {number}: {line}")


@contextlib.contextmanager
def _forwarding_signals(processes: list[Process], received: list[signal.Signals]) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM makes the processes save and stop, the second one kills them.

    They get SIGTERM for the first, whichever it was; before they handle it, it ends them without a message.
    """

    def forward(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        for process in processes:
            process.send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[Process]) -> tuple[int, int]:
    """Waits for all to end; once one has failed, at most `GRACE_PERIOD` seconds.

    Returns the number and the status of the process that decided how the run ends: the first with an expected
    status, or the first to fail. The status is that of `Popen`, or -SIGSTOP if it was stopped by a signal and
    the others failed for that.
    """
    decided, deadline = None, float("inf")
    while None in [process.poll() for process in processes] and time.monotonic() < deadline:
        if decided is None:
            decided = _decided(processes)
            if decided and decided[1] not in EXPECTED_STATUSES:
                deadline = time.monotonic() + GRACE_PERIOD
        time.sleep(0.05)
    return decided or _decided(processes) or (0, 0)


def _decided(processes: list[Process]) -> tuple[int, int] | None:
    """The number and status of a process that decides how the run ends; None if all goes well so far."""
    statuses = {number: process.returncode for number, process in enumerate(processes) if process.returncode}
    if not statuses:
        return None
    for number, status in statuses.items():
        if status in EXPECTED_STATUSES:
            return number, status
    for number, process in enumerate(processes):
        if process.returncode is None and _is_stopped(process):
            return number, -signal.SIGSTOP
    return min(statuses.items(), key=lambda found: found[1])  # a signal, rather than what came of it


def _is_stopped(process: Process) -> bool:
    """Whether a signal has stopped it; False on macOS before Python 3.13, which has no `os.waitid`."""
    if not hasattr(os, "waitid"):
        return False
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_text(status: int) -> str:
    """How a process ended, from its `Popen.returncode`, or -SIGSTOP."""
    if status >= 0:
        return f"failed with exit status {status}"
    return f"was {'stopped' if status == -signal.SIGSTOP else 'ended'} by {signal.Signals(-status).name}"
