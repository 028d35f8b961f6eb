"""The command ``mmnnx launch``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mmnnx.exit_status import MISTAKE
from mmnnx.launch.gke import Gke
from mmnnx.launch.hosts import Hosts
from mmnnx.launch.slurm import Slurm
from mmnnx.launch.tpu_pod import TpuPod
from mmnnx.options import parse_options
from mmnnx.train.errors import UserError

Way = Hosts | Slurm | Gke | TpuPod
WAYS: dict[str, type[Way]] = {"--hosts": Hosts, "--slurm": Slurm, "--gke": Gke, "--tpu-pod": TpuPod}

USAGE = """usage: mmnnx launch --hosts HOST ... -- COMMAND
       mmnnx launch --slurm --nodes N --gpus-per-node N [OPTIONS] -- COMMAND
       mmnnx launch --gke --image IMAGE --nodes N --gpus-per-node N [OPTIONS] -- COMMAND
       mmnnx launch --gke --image IMAGE --nodes N --tpus-per-node N --accelerator NAME --topology T -- COMMAND
       mmnnx launch --tpu-pod NAME --zone ZONE [OPTIONS] -- COMMAND

Prints what starts COMMAND in every process of a run: a line for each host, a job script for Slurm (| sbatch),
a manifest for Google Kubernetes Engine (| kubectl create -f -), or a line for a Cloud TPU slice (| sh).
COMMAND is "train" with its options, or any program that calls mm.initialize(): "python script.py".

`mmnnx launch --slurm --help` lists the options of --slurm, and so for the others."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx launch`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0; 2 for a mistake in the options.
    """
    own = list(options)
    command: list[str] = []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    ways = [way for way in WAYS if any(option.split("=")[0] == way for option in own)]
    asks_for_help = "--help" in own or "-h" in own
    if asks_for_help and len(ways) != 1:
        print(USAGE)
        return 0
    if not command and not asks_for_help:
        print_error("nothing to launch: give the command after --, as in: mmnnx launch --slurm -- train")
        return MISTAKE
    if len(ways) != 1:
        print_error(f"give one of {', '.join(WAYS)}" + (f", not {' and '.join(ways)}" if ways else ""))
        return MISTAKE
    try:
        # For mistakes tyro names the command that lists the options: this one, with --help.
        name, own = ("launch", ["--help"]) if asks_for_help else (f"launch {ways[0]}", own)
        way: Way = parse_options(WAYS[ways[0]], name, own)
        text = way.write(command)
    except UserError as error:
        print_error(str(error))
        return MISTAKE
    sys.stdout.write(text)
    return 0
