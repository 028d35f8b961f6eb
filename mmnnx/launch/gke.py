"""``mmnnx launch --gke``: an indexed Job, and the Service by which its pods know each other's names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from mmnnx.launch.command import arguments, check_counts, check_name, check_train
from mmnnx.train.errors import UserError

_PORT = 7733
_LABEL = r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?"  # room for "-" and the number of a pod, in 63 characters

_MANIFEST = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never{selectors}
      containers:
      - name: {name}
        image: {image}
        command: {command}
        resources:
          limits:
            {resource}: {each}{environment}{mounts}
"""

# JAX's own detector would need the kubernetes package in the image, and a role that may read pods and jobs.
_ENVIRONMENT = """
        env:
        - name: JAX_COORDINATOR_ADDRESS
          value: {address}
        - name: JAX_NUM_PROCESSES
          value: "{nodes}"
        - name: JAX_PROCESS_ID
          valueFrom:
            fieldRef:
              fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
        - name: JAX_LOCAL_DEVICE_IDS
          value: "{devices}\""""

_MOUNTS = """
        volumeMounts:
        - name: volume
          mountPath: {path}
      volumes:
      - name: volume
        persistentVolumeClaim:
          claimName: {claim}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gke:
    """Print a manifest: mmnnx launch --gke --image IMAGE OPTIONS -- COMMAND | kubectl create -f -

    It starts a process on each node, with all GPUs or TPUs of it. COMMAND is "train" with its options, or any
    program that calls mm.initialize(), as the image has them.
    """

    gke: bool = False
    """Print a manifest for Google Kubernetes Engine; with GPUs, other Kubernetes does as well."""
    image: str
    """Container image with mmnnx in it, and JAX for the accelerator."""
    nodes: int
    """Nodes of the job, each with one pod."""
    gpus_per_node: int | None = None
    """GPUs of each node."""
    tpus_per_node: int | None = None
    """TPU chips of each node: 1, 4 or 8."""
    accelerator: str | None = None
    """Kind of accelerator, as GKE labels its nodes: nvidia-h100-80gb, tpu-v5p-slice. Default: any GPU."""
    topology: str | None = None
    """Topology of the TPU slice, as GKE labels its nodes: 4x4x4."""
    volume: str | None = None
    """CLAIM:PATH, a PersistentVolumeClaim and where it is mounted in every pod.
    What a run writes elsewhere is lost with its pods; checkpoints need a place that all pods share."""
    name: str = "mmnnx"
    """Name of the Job and of the Service."""

    def write(self, command: Sequence[str]) -> str:
        """The manifest. Raises UserError for what GKE, or `mmnnx train` in this job, would refuse."""
        check_counts(nodes=self.nodes, gpus_per_node=self.gpus_per_node, tpus_per_node=self.tpus_per_node)
        check_name("image", self.image, r"\w[\w./:@-]*", "registry.example/my-image:1")
        check_name("accelerator", self.accelerator, r"[\w.-]+", "nvidia-h100-80gb or tpu-v5p-slice")
        check_name("topology", self.topology, r"[1-9]\d*(x[1-9]\d*){1,2}", "4x4 or 4x4x4")
        check_name("volume", self.volume, r"[a-z0-9][a-z0-9.-]*:/[\w./-]*", "my-claim:/mnt/runs")
        check_name("name", self.name, _LABEL, "my-run")
        if self.gpus_per_node and not self.tpus_per_node:
            return self._gpu(command, self.gpus_per_node)
        if self.tpus_per_node and not self.gpus_per_node:
            return self._tpu(command, self.tpus_per_node)
        raise UserError("--gke needs the accelerators of a node: either --gpus-per-node or --tpus-per-node")

    def _gpu(self, command: Sequence[str], each: int) -> str:
        if self.topology is not None:
            raise UserError(f"--topology {self.topology} is of TPUs: leave it out with --gpus-per-node")
        check_train(command, self.nodes, each)
        environment = _ENVIRONMENT.format(
            address=_quoted(f"{self.name}-0.{self.name}:{_PORT}"),
            nodes=self.nodes,
            devices=",".join(map(str, range(each))),
        )
        selectors = {"cloud.google.com/gke-accelerator": self.accelerator} if self.accelerator else {}
        return self._manifest(arguments(command), "nvidia.com/gpu", each, selectors, environment)

    def _tpu(self, command: Sequence[str], each: int) -> str:
        """GKE itself tells the processes of an indexed Job with a subdomain, in variables that JAX reads."""
        if self.accelerator is None or self.topology is None:
            raise UserError(
                "--tpus-per-node needs --accelerator and --topology, which GKE has as labels of the nodes"
            )
        chips = math.prod(map(int, self.topology.split("x")))
        if each not in ((1, 4, 8) if self.nodes == 1 else (4,)):
            raise UserError(
                f"--tpus-per-node {each}: a TPU node of GKE has 1, 4 or 8 chips; 4 if a slice has several"
            )
        if self.nodes * each != chips:
            raise UserError(
                f"--topology {self.topology} has {chips} chips, and --nodes {self.nodes} with "
                f"--tpus-per-node {each} have {self.nodes * each}"
            )
        check_train(command, self.nodes, None)
        selectors = {
            "cloud.google.com/gke-tpu-accelerator": self.accelerator,
            "cloud.google.com/gke-tpu-topology": self.topology,
        }
        return self._manifest(arguments(command, cluster=True), "google.com/tpu", each, selectors, "")

    def _manifest(
        self, command: list[str], resource: str, each: int, selectors: dict[str, str], environment: str
    ) -> str:
        lines = "".join(f"\n        {label}: {_quoted(value)}" for label, value in selectors.items())
        claim, _, path = (self.volume or "").partition(":")
        # Kubernetes takes $(NAME) for a variable, and $$ for a dollar.
        words = ", ".join(_quoted(word.replace("$", "$$")) for word in command)
        return _MANIFEST.format(
            name=_quoted(self.name),
            nodes=self.nodes,
            image=_quoted(self.image),
            command=f"[{words}]",
            selectors=f"\n      nodeSelector:{lines}" if lines else "",
            resource=resource,
            each=each,
            environment=environment,
            mounts=_MOUNTS.format(path=_quoted(path), claim=_quoted(claim)) if self.volume else "",
        )


def _quoted(text: str) -> str:
    """A double-quoted YAML string. It is that of JSON, but for characters that YAML wants escaped.

    >>> _quoted('say "no"')
    '"say \\\\"no\\\\""'
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
