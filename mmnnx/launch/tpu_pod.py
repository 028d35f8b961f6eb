"""``mmnnx launch --tpu-pod``: the line that starts a process on every host of a Cloud TPU slice."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from mmnnx.launch.command import arguments, check_name, check_train

_NAME = r"[a-z]([a-z0-9-]*[a-z0-9])?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuPod:
    """Print a gcloud line: mmnnx launch --tpu-pod NAME --zone ZONE -- COMMAND | sh

    It starts a process on every host of the slice; JAX asks Google Cloud's metadata server which is which.
    COMMAND is "train" with its options, or any program that calls mm.initialize().
    """

    tpu_pod: str
    """Name of the TPU VM."""
    zone: str
    """Zone in which it is, such as us-central2-b."""
    project: str | None = None
    """Google Cloud project. Default: that of gcloud."""

    def write(self, command: Sequence[str]) -> str:
        """The line. Raises UserError for names that Google Cloud does not have, and impossible options."""
        check_name("tpu-pod", self.tpu_pod, _NAME, "my-slice")
        check_name("zone", self.zone, _NAME, "us-central2-b")
        check_name("project", self.project, r"[a-z0-9][a-z0-9.:-]*", "my-project")
        check_train(command, 1, None)
        project = [f"--project={self.project}"] if self.project else []
        where = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.tpu_pod, f"--zone={self.zone}", *project]
        remote = shlex.join(arguments(command, cluster=True))
        return f"{shlex.join([*where, '--worker=all', f'--command={remote}'])}\n"
