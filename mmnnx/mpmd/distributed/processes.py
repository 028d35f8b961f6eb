"""The processes that run a program together: what each has, and how they agree on what they run.

Every process runs the same Python and builds the same program; each runs the instructions that touch its own
devices. `jax.distributed` is the engine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, PartitionSpec, Sharding

from mmnnx.mpmd.distributed.key_value import hear, say
from mmnnx.mpmd.distributed.progress import move

_programs = itertools.count(1)


@functools.lru_cache(maxsize=4096)
def holders(where: Mesh | Sharding) -> frozenset[int]:
    """The processes that have devices of a mesh, or of a sharding."""
    devices = where.devices.flat if isinstance(where, Mesh) else cast(Any, where.device_set)
    return frozenset(d.process_index for d in devices)


def is_here(where: Mesh | Sharding) -> bool:
    """Whether this process has devices of a mesh, or of a sharding."""
    return jax.process_index() in holders(where)


def are_apart(a: Mesh, b: Mesh) -> bool:
    """Whether two meshes are of more than one process between them."""
    return len(holders(a) | holders(b)) > 1


def elsewhere(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def agree(describe: Callable[[], str], name: str) -> int:
    """Checks that all processes have built the same program; returns the number by which they know it.

    Args:
      describe: gives the program as text.
      name: of the function that it is of, for messages.

    Raises:
      ValueError: if they have not, with the first line that differs.
    """
    if jax.process_count() == 1:
        return 0
    program, number = describe(), next(_programs)
    move(lambda _: f"the building of program {number}, of {name} for arguments that it had not had before")
    say(f"program {number}", hashlib.sha256(program.encode()).digest())
    others = {p: hear(p, f"program {number}") for p in range(jax.process_count())}
    if len(set(others.values())) == 1:
        return number
    say(f"text {number}", program.encode())
    lines = {p: hear(p, f"text {number}").decode().splitlines() for p in others}
    say(f"read {number}", b"")
    for p in others:  # nobody ends before all have read
        hear(p, f"read {number}")
    other = next(p for p in others if others[p] != others[0])
    first, second = lines[0], lines[other]
    common = min(len(first), len(second))
    at = next((n for n in range(common) if first[n] != second[n]), common)
    shown = [text[at] if at < len(text) else "nothing" for text in (first, second)]
    raise ValueError(
        f"processes 0 and {other} have built different programs. They differ in line {at + 1}:\n"
        f"  process 0: {shown[0]}\n  process {other}: {shown[1]}\n"
        "Every process must run the same script with the same configuration and shapes"
    )


def tell_specs(program: int, fragment: int, mesh: Mesh, specs: Sequence[PartitionSpec]) -> None:
    """Tells the processes that are not on `mesh` how a fragment's results are sharded there."""
    own = holders(mesh)
    if mesh.size > 1 and len(own) < jax.process_count() and min(own) == jax.process_index():
        say(f"specs {program} {fragment}", json.dumps([list(spec) for spec in specs]).encode())


def hear_specs(program: int, fragment: int, mesh: Mesh, count: int) -> list[PartitionSpec]:
    """How the results of a fragment are sharded on a mesh of which this process has no device."""
    if mesh.size == 1:
        return [PartitionSpec()] * count
    specs = json.loads(hear(min(holders(mesh)), f"specs {program} {fragment}"))
    return [PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in specs]
