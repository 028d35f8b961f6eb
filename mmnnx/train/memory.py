"""The most bytes in use on the devices of each mesh: as counted, or as compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mmnnx.mpmd.jit.jit import Jit
from mmnnx.plan import plan
from mmnnx.train.checkpoint.agreement import exchange


def make_peak_bytes(train_step: Jit, devices: np.ndarray) -> Callable[..., dict[str, int]]:
    """``peak_bytes(model, optimizer, batch)``: for each mesh, the bytes of its fullest device.

    Every process must call it, at the same steps; the arguments are those of `train_step`.

    Args:
      devices: [meshes, ...], the mesh of stage n first.

    Returns:
      Where devices count, as accelerators do: "peak_bytes_in_use/stage0" and so on, the most so far. Else
      "program_peak_bytes/stage0": what the compiled step needs, temporaries among it, which does not change;
      nothing for one device or in several processes.
    """
    planned: dict[str, int] | None = None

    def peak_bytes(*args: Any) -> dict[str, int]:
        nonlocal planned
        if counted := bytes_in_use(devices):
            return {f"peak_bytes_in_use/{name}": count for name, count in counted.items()}
        if planned is None:
            can_plan = devices.size > 1 and jax.process_count() == 1
            memory = plan(train_step, *args).memory if can_plan else ()
            planned = {f"program_peak_bytes/{m.meshes[0]}": m.total for m in memory}
        return planned

    return peak_bytes


def bytes_in_use(devices: np.ndarray) -> dict[str, int]:
    """The most bytes that a device of each mesh had in use so far; of meshes without a device that counts,
    nothing. Every process must call it."""
    own: dict[str, int] = {}
    for number, mesh in enumerate(devices):
        local = [d for d in mesh.flat if d.process_index == jax.process_index()]
        counts = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
        if known := [count for count in counts if count is not None]:
            own[f"stage{number}"] = max(known)
    found: dict[str, int] = {}
    for counted in map(json.loads, exchange(json.dumps(own))):
        found |= {name: max(count, found.get(name, 0)) for name, count in counted.items()}
    return found
