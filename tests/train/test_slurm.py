"""A job script of `mmnnx launch --slurm`, run with an srun that starts its processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mmnnx.cli import main
from tests.processes.harness import free_port
from tests.train.command import MODEL, losses

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_JOB_ID=7 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
for n in 0 1; do SLURM_PROCID=$n SLURM_LOCALID=$n "$@" & done
wait -n && wait -n
"""


@pytest.fixture
def srun(tmp_path, environment, capsys):
    """``srun(command)``: what a job of two processes prints. Nothing of it is left."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "JAX_COORDINATOR_PORT": str(free_port())}

    def srun(*command: str) -> str:
        assert main(["launch", "--slurm", "--nodes", "2", "--gpus-per-node", "0", "--", *command]) == 0
        job = subprocess.Popen(
            ["bash", "-c", capsys.readouterr().out],
            env=environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = job.communicate(timeout=180)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
        assert job.returncode == 0, printed
        return printed

    return srun


@pytest.mark.slow
def test_a_program_that_calls_initialize(srun):
    """Both processes print; each line is one write, as they share the output."""
    program = "import sys, mmnnx as mm, jax; mm.initialize(); "
    program += "sys.stdout.write(f'{jax.process_index()} of {jax.process_count()}\\n')"
    assert sorted(srun(sys.executable, "-c", program).splitlines()) == ["0 of 2", "1 of 2"]


@pytest.mark.slow
def test_the_main_job(srun, tmp_path, text):
    out = tmp_path / "run"
    options = [
        *MODEL,
        "--stages",
        "2",
        "--tensor",
        "1",
        "--steps",
        "2",
        "--data",
        str(text),
        "--out",
        str(out),
    ]
    printed = srun("train", *options)
    assert "on 2 x 1 cpu devices of 2 processes" in printed
    assert len(losses(out)) == 2
