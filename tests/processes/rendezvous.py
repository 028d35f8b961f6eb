"""Starts from the environment, says what listens, hands something over, and starts a second time."""

import contextlib
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import mmnnx as mm

COORDINATOR, COUNT, NUMBER = sys.argv[1:4]
os.environ |= {
    "JAX_COORDINATOR_ADDRESS": COORDINATOR,
    "JAX_NUM_PROCESSES": COUNT,
    "JAX_PROCESS_ID": NUMBER,
}


def listening():
    """The IPv4 addresses, and such addresses in IPv6, at which this process listens."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            own.add(os.readlink(file))
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                yield ".".join(map(str, bytes.fromhex(fields[1].partition(":")[0][-8:])[::-1]))


mm.initialize(initialization_timeout=6 if COUNT == "3" else 60)
print(f"process {jax.process_index()} of {jax.process_count()}")
mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",))
first, second = (mm.task(jnp.tanh, f"t{n}", mesh_slice={"stage": n}) for n in range(2))
mm.fetch(mm.jit(lambda x: first(second(first(x))), mesh=mesh)(jnp.ones(4)))
print("listens at:", sorted(set(listening())))
try:
    mm.initialize()
except RuntimeError as error:
    print("RuntimeError:", error)
