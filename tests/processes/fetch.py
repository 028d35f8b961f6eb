"""Fetches small and large things many times, and counts what is left in the key-value store."""

import atexit
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.distributed.key_value import store
from mmnnx.mpmd.distributed.processes import absent_array

COORDINATOR, COUNT, NUMBER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# Called after what mm.initialize has called at exit: nothing of it may look at arrays while Python goes away.
atexit.register(lambda: print("threads:", sum(t.name == "mmnnx-watchdog" for t in threading.enumerate())))
mm.initialize(COORDINATOR, COUNT, NUMBER)
assert any(t.name == "mmnnx-watchdog" for t in threading.enumerate())
devices = np.array(jax.devices())
everywhere, first, last = (jax.sharding.Mesh(d, ("x",)) for d in (devices, devices[:2], devices[-2:]))


def place(value, mesh, spec):
    """The same value in every process as one array on a mesh."""
    sharding = NamedSharding(mesh, spec)
    if any(d.process_index == NUMBER for d in mesh.devices.flat):
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return absent_array(value.shape, value.dtype, sharding)


tree = {
    "loss": place(np.float32(2.5), last, P()),
    "bf16": place(np.arange(6.0, dtype=jnp.bfloat16).reshape(2, 3), first, P("x")),
    "all": place(np.arange(24).reshape(12, 2), everywhere, P("x")),
    "same": place(np.arange(3), everywhere, P()),
    "number": 7,
}
times = []
for n in range(50):
    began = time.perf_counter()
    got = mm.fetch(tree) if n % 2 else mm.fetch({"loss": tree["loss"]})
    times.append(time.perf_counter() - began)
assert got["loss"] == 2.5 and got["loss"].shape == () and got["loss"].dtype == np.float32
assert got["bf16"].tolist() == [[0, 1, 2], [3, 4, 5]] and got["bf16"].dtype == jnp.bfloat16
assert got["all"].tolist() == np.arange(24).reshape(12, 2).tolist()
assert got["same"].tolist() == [0, 1, 2] and got["number"] == 7
print(f"median of a fetch: {1e3 * sorted(times)[25]:.2f} ms")
mm.fetch(place(np.float32(1), last, P()))
print("keys:", len(store().key_value_dir_get_bytes("mmnnx/")))
# In several pieces, and the last thing that the process does which has it.
large = np.arange(2**20, dtype=np.float32)
np.testing.assert_array_equal(mm.fetch(place(large, last, P("x"))), large)
