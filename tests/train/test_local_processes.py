"""`mmnnx train --processes N`: several processes that are one run, and end as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmnnx.output import Output, saying
from mmnnx.train import local_processes, train
from mmnnx.train.accelerators import share_accelerators
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError
from mmnnx.train.run_folder import RunFolder
from tests.train.command import MODEL, losses, run, started, validations, wait_until

STEPS = 24
OPTIONS = [*MODEL, "--stages", "2", "--tensor", "2", "--steps", STEPS, "--eval-every", "4"]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> Path:
    """The folder of the run in one process, on one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    sizes = dict(microbatches=2, batch=4, sequence=16, warmup=2, sample=0, layers=2, width=16)
    sizes |= dict(heads=2, kv_heads=2, mlp=32, steps=STEPS, eval_every=4, stages=1, tensor=1)
    return train(TrainConfig(data=text, out=out, **sizes)).path


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there."""
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check(folder: Path, alone: Path) -> None:
    assert losses(folder) == pytest.approx(losses(alone), abs=1e-3)
    expected = validations(alone)
    found = {step: bits for step, bits in validations(folder).items() if step in expected}
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_stages_that_span_processes_then_fewer_processes(tmp_path, text, environment, alone):
    """Four processes, two a stage, are asked to stop; two go on to the end."""
    out = tmp_path / "run"
    with started(environment, *OPTIONS, "--data", text, "--out", out, "--processes", "4") as launcher:
        assert "on 2 x 2 cpu devices of 4 processes" in launcher.stdout.readline()
        wait_until(lambda: len(losses(out)) >= 2, launcher)
        processes = children(launcher.pid)
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 143
    taken = len(losses(out))
    assert RunFolder(out).saved == taken < STEPS
    assert errors == f"mmnnx: stopped after step {taken}; to go on: mmnnx train --resume --out {out}\n"
    assert len(processes) == 4 and not any(map(is_there, processes))

    status, said, errors = run(environment, "--resume", "--out", out, "--processes", "2", "--sample", "4")
    assert status == 0, errors
    assert errors == ""
    assert "on 2 x 2 cpu devices of 2 processes" in said and "a sample of its text" in said
    assert len((out / "sample.txt").read_bytes()) >= 8
    check(out, alone)


@pytest.mark.slow
def test_as_many_programs_in_flight_as_xla_allows(tmp_path, text, environment):
    """Large enough that 32 programs wait on a device: on few cores they once took all of XLA's threads."""
    sizes = ["--layers", "8", "--width", "96", "--mlp", "256", "--batch", "16", "--microbatches", "8"]
    options = ["--stages", "2", "--tensor", "2", "--steps", "4", "--sequence", "64", "--sample", "0"]
    out = tmp_path / "run"
    status, _, errors = run(environment, *sizes, *options, "--data", text, "--out", out, "--processes", "2")
    assert status == 0, errors
    assert len(losses(out)) == 4


@pytest.mark.slow
def test_one_is_killed_and_one_process_goes_on(tmp_path, text, environment, alone):
    out = tmp_path / "run"
    options = [*OPTIONS, "--data", text, "--out", out]
    with started(environment, *options, "--processes", "2") as launcher:
        wait_until(lambda: RunFolder(out).saved, launcher)
        processes = children(launcher.pid)
        os.kill(processes[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert not any(map(is_there, processes))
    assert errors.splitlines()[-1] == (
        f"mmnnx: process 1 (process id {processes[1]}) was ended by SIGKILL; ended the others, the "
        f"checkpoint of step {RunFolder(out).saved} is kept; to go on: mmnnx train --resume --out {out}"
    )
    status, _, errors = run(environment, "--resume", "--out", out, "--processes", "1")
    assert status == 0, errors
    check(out, alone)


@pytest.mark.slow
def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path, text, environment):
    with started(
        environment, *OPTIONS, "--data", text, "--out", tmp_path / "run", "--processes", "2"
    ) as launcher:
        wait_until(lambda: len(children(launcher.pid)) == 2, launcher)
        processes = children(launcher.pid)
        wait_until((tmp_path / "run" / "config.json").exists, launcher)
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 30
        while any(map(is_there, processes)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_a_mistake_that_a_process_finds_is_told_once(tmp_path, environment):
    status, out, errors = run(environment, *OPTIONS, "--data", tmp_path / "nowhere", "--processes", "2")
    assert (status, out) == (2, "")
    assert errors == f"mmnnx: --data {tmp_path / 'nowhere'}: there is no such file or folder\n"


def test_processes_say_as_much_as_the_one_that_starts_them(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    saying_so = saying(Output(quiet=True, log_level="info"))
    with saying_so, local_processes._process(0, ["--steps", "3"], dict(os.environ)) as process:
        process.wait()
    assert capfd.readouterr().out == "-m mmnnx --quiet --log-level info train --steps 3\n"


def start(program: str) -> local_processes.Process:
    return subprocess.Popen([sys.executable, "-c", program], text=True)


@pytest.mark.parametrize(
    ("programs", "decides", "how"),
    [
        (["", ""], (0, 0), None),
        (["", "exit(2)"], (1, 2), None),
        (["import time; time.sleep(60)", "exit(1)"], (1, 1), "failed with exit status 1"),
        (
            [
                "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
                "import time; time.sleep(1); exit(1)",
            ],
            (0, -signal.SIGSTOP),
            "was stopped by SIGSTOP",
        ),
        (
            ["import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"],
            (0, -9),
            "was ended by SIGKILL",
        ),
    ],
)
def test_the_one_that_decides_how_it_ends(programs, decides, how, monkeypatch):
    monkeypatch.setattr(local_processes, "GRACE_PERIOD", 0.2)
    processes = [start(program) for program in programs]
    try:
        assert local_processes._wait(processes) == decides
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert how is None or local_processes._exit_text(decides[1]) == how


def test_the_first_signal_asks_and_the_second_kills():
    program = "import signal, time; signal.signal(15, print); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE)
    received: list[signal.Signals] = []
    try:
        process.stdout.readline()
        with local_processes._forwarding_signals([process], received):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            assert process.poll() is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGKILL
        assert received == [signal.SIGINT, signal.SIGTERM]
    finally:
        process.kill()
        process.communicate()


def test_a_run_on_virtual_devices_beside_accelerators_is_told(monkeypatch, caplog):
    monkeypatch.setattr("mmnnx.train.accelerators._accelerators", lambda: ("gpu", 1))
    share_accelerators(8, 2)
    assert "it needs 8 devices" in caplog.text and "JAX finds 1 gpu" in caplog.text


def test_accelerators_are_shared_out(monkeypatch):
    """The variables of each process, on machines with so many accelerators."""
    for found, devices, processes, expected in [
        (("gpu", 8), 8, 4, ["0,1", "2,3", "4,5", "6,7"]),
        (("gpu", 8), 2, 2, ["0", "1"]),
        (("gpu", 1), 8, 2, None),
        (("cpu", 0), 8, 4, None),
    ]:
        monkeypatch.setattr("mmnnx.train.accelerators._accelerators", lambda found=found: found)
        shares = share_accelerators(devices, processes)
        if expected is None:
            assert shares == [{"JAX_PLATFORMS": "cpu"}] * processes
        else:
            assert shares == [{"JAX_LOCAL_DEVICE_IDS": ids} for ids in expected]
    monkeypatch.setattr("mmnnx.train.accelerators._accelerators", lambda: ("tpu", 4))
    with pytest.raises(UserError, match="this machine has 4 of tpu: use one process, or JAX_PLATFORMS=cpu"):
        share_accelerators(4, 2)
