"""``mmnnx launch --slurm``: a job script for sbatch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from mmnnx.launch.command import arguments, check_counts, check_name, check_train
from mmnnx.train.errors import UserError

_NAMES = r"\w[\w.,-]*"
_TIME = r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}"  # of sbatch, but for its words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """Print a job script: mmnnx launch --slurm --nodes 4 --gpus-per-node 8 -- COMMAND | sbatch

    It starts a process for each GPU, or for each node where there are none; JAX reads in Slurm's variables
    which is which. COMMAND is "train" with its options, or any program that calls mm.initialize(). sbatch
    takes its other options on its own command line.
    """

    slurm: bool = False
    """Print a job script for Slurm."""
    nodes: int
    """Nodes of the job."""
    gpus_per_node: int
    """GPUs of each node, with a process for each; 0 for one process on the CPUs of each node."""
    cpus_per_task: int | None = None
    """CPU cores of each process. Default: that of the cluster, often one."""
    partition: str | None = None
    """Partition to run in."""
    account: str | None = None
    """Account to charge."""
    time: str | None = None
    """Time limit in a format of Slurm: minutes, hours:minutes:seconds or days-hours."""
    job_name: str = "mmnnx"
    """Name of the job."""

    def write(self, command: Sequence[str]) -> str:
        """The script. Raises UserError for what Slurm, or `mmnnx train` in this job, would refuse."""
        check_counts(nodes=self.nodes, cpus_per_task=self.cpus_per_task)
        if self.gpus_per_node < 0:
            raise UserError(f"--gpus-per-node {self.gpus_per_node} must not be below zero")
        check_name("job-name", self.job_name, _NAMES, "my-run")
        check_name("partition", self.partition, _NAMES, "gpu")
        check_name("account", self.account, _NAMES, "my-project")
        check_name("time", self.time, _TIME, "24:00:00 or 2-12:00:00")
        tasks = self.gpus_per_node or 1
        check_train(command, self.nodes * tasks, 1 if self.gpus_per_node else None)
        options = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": tasks,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
        }
        head = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
        # srun does not take over the cores of sbatch; and without the second option a process that fails
        # before it has found the others would leave them waiting.
        cores = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        line = shlex.join(["srun", *cores, "--kill-on-bad-exit=1", *arguments(command, cluster=True)])
        return f"#!/bin/bash\n{head}\n\nexec {line}\n"
