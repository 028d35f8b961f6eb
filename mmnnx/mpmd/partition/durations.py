"""How long the work of a loop takes, by rule of thumb: enough to tell whether it waits for the host."""

from __future__ import annotations

from collections import defaultdict

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Loop, nbytes
from mmnnx.mpmd.ir.flops import flops_of
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.timeline import DISPATCH, UNIT_COSTS
from mmnnx.mpmd.schedule.choose import Durations

# (operations a second, bytes a second, seconds of the host to start a call and a transfer). A virtual CPU
# device shares its cores with the host: as measured with benchmarks/side_by_side.py on two cores. A GPU gets
# its work kernel by kernel: as measured with benchmarks/gpu.py on an H100. Others are taken to be as fast as
# a TPU v5e is at half of its speed.
_CPU = 2e10, 2e10, 260e-6
_GPU = 2e14, 1.5e12, 500e-6
_TPU = 1e14, 4e11, 2 * DISPATCH


def estimate_durations(loop: Loop, placement: Placement) -> Durations:
    """The durations of one microbatch of a loop, on the mesh that works longest.

    They depend on shapes alone, so that all processes, and all runs, come to the same.

    Args:
      loop: the loop.
      placement: of its body.
    """
    seconds: defaultdict[Mesh, float] = defaultdict(float)
    platform, units = "cpu", UNIT_COSTS["forward"]
    for e in loop.body:
        location = placement.locations.get(e)
        if location is None:
            continue
        platform = location.mesh.devices.flat[0].platform
        speed, bandwidth, _ = _rates(platform)
        work = sum(flops_of([e.eqn]).values()) / speed + sum(map(nbytes, e.outvars)) / bandwidth
        seconds[location.mesh] += work / location.mesh.size
        if placement.phases[e] == "backward":
            units = UNIT_COSTS["forward"] + UNIT_COSTS["backward"]
    *_, dispatch = _rates(platform)
    return Durations(max(seconds.values(), default=0.0) / units, dispatch)


def _rates(platform: str) -> tuple[float, float, float]:
    return {"cpu": _CPU, "gpu": _GPU}.get(platform, _TPU)
