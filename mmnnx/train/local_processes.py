"""The processes of a run on this machine: started, watched, and ended together.

The process that does this uses no JAX. Their standard input is a pipe from it: when it is gone, whatever
became of it, they read the end of the pipe and go too.
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

from mmnnx.train.accelerators import share_accelerators
from mmnnx.train.config import TrainConfig
from mmnnx.train.run_folder import RunFolder

MISTAKE, DIVERGED = 2, 3
ENDINGS = {0, MISTAKE, DIVERGED, 128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit statuses to which the processes of a run come together; the first process has told the user why."""

MOMENT = 5.0
"""Seconds that the others have, once a process has failed, to say where they are and to leave."""

LAUNCHER = "MMNNX_LAUNCHER"  # the process id of what started this process

Process = subprocess.Popen[str]


def supervise(options: Sequence[str], config: TrainConfig, tell: Callable[[str], None]) -> int:
    """Runs `mmnnx train` with these options in ``config.processes`` processes on this machine.

    The first one writes to the terminal as a single process would; errors of the others come through with
    their number in front. Ctrl-C and SIGTERM are passed on; a second one ends them all at once. If one fails,
    the others are gone within `MOMENT` seconds.

    Returns the exit status that they agree on; 1 if one failed, and `tell` is given which and how.

    Raises UserError for accelerators that cannot be shared out.
    """
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(config.processes),
        LAUNCHER: str(os.getpid()),
    }
    shares = share_accelerators(config.stages * config.tensor, config.processes)
    processes: list[Process] = []
    asked: list[signal.Signals] = []
    with contextlib.ExitStack() as stack, _passing_on(processes, asked):
        for number, share in enumerate(shares):
            own = environment | share | {"JAX_PROCESS_ID": str(number)}
            processes.append(stack.enter_context(_process(number, options, own)))
        number, status = _wait(processes)
    if asked:
        if status not in ENDINGS:
            tell("stopped at once; what was not in a checkpoint is lost")
        return 128 + asked[0]
    if status in ENDINGS:
        return status
    folder = RunFolder(config.folder())
    left = (
        "there was no checkpoint yet"
        if folder.saved is None
        else f"the checkpoint of step {folder.saved} is kept; to go on: mmnnx train --resume --out "
        f"{shlex.quote(str(folder.path))}"
    )
    tell(f"process {number} (process id {processes[number].pid}) {_how(status)}; ended the others, {left}")
    return 1


def follow_launcher() -> None:
    """Ends this process when the one that started it is gone; does nothing in one that `supervise` did not
    start."""

    def wait() -> None:
        os.read(0, 1)  # nothing ever comes but the end
        os.write(2, b"mmnnx: the process that started this one is gone: so is this\n")
        os._exit(1)

    if LAUNCHER in os.environ:
        threading.Thread(target=wait, daemon=True).start()


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _process(number: int, options: Sequence[str], environment: dict[str, str]) -> Iterator[Process]:
    """Starts one process, which is gone in the end.

    It is in a group of its own: Ctrl-C on the terminal reaches it through `supervise` alone.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mmnnx", "train", *options],
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
def _passing_on(processes: list[Process], asked: list[signal.Signals]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM ask the processes to save and stop, and at the second time kill them.

    All that they get is SIGTERM, which ends them in silence where they are not yet ready to be asked.
    """

    def pass_on(number: int, _: object) -> None:
        asked.append(signal.Signals(number))
        for process in processes:
            process.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[Process]) -> tuple[int, int]:
    """Waits for all to end, but a moment alone once one has failed.

    Returns the number and the status of the one that decided it: the first to end with what they all come
    to, or to fail. The status is that of `Popen`, or -SIGSTOP of one that somebody stopped, whereupon the
    others failed.
    """
    decided, deadline = None, float("inf")
    while None in [process.poll() for process in processes] and time.monotonic() < deadline:
        if decided is None:
            decided = _decided(processes)
            if decided and decided[1] not in ENDINGS:
                deadline = time.monotonic() + MOMENT
        time.sleep(0.05)
    return decided or _decided(processes) or (0, 0)


def _decided(processes: list[Process]) -> tuple[int, int] | None:
    """The number and status of a process that decides how the run ends; None if all goes well so far."""
    statuses = {number: process.returncode for number, process in enumerate(processes) if process.returncode}
    if not statuses:
        return None
    for number, status in statuses.items():
        if status in ENDINGS:
            return number, status
    for number, process in enumerate(processes):
        if process.returncode is None and _is_stopped(process):
            return number, -signal.SIGSTOP
    return min(statuses.items(), key=lambda found: found[1])  # a signal, rather than what came of it


def _is_stopped(process: Process) -> bool:
    """Whether somebody has stopped it; False on macOS before Python 3.13, which cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _how(status: int) -> str:
    """How a process ended, from its `Popen.returncode`, or -SIGSTOP."""
    if status >= 0:
        return f"failed with exit status {status}"
    return f"was {'stopped' if status == -signal.SIGSTOP else 'ended'} by {signal.Signals(-status).name}"
