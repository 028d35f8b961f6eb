"""What processes compare and tell each other about a program while they build and compile it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, PartitionSpec

from mmnnx.mpmd.distributed import key_value, progress
from mmnnx.mpmd.distributed.processes import holders

_programs = itertools.count(1)


def check_same_program(describe: Callable[[], str], name: str) -> int:
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
    progress.enter(
        lambda _: f"the building of program {number}, of {name} for arguments that it had not had before"
    )
    key_value.put(f"program {number}", hashlib.sha256(program.encode()).digest())
    digests = {p: key_value.get(p, f"program {number}") for p in range(jax.process_count())}
    if len(set(digests.values())) == 1:
        return number
    key_value.put(f"text {number}", program.encode())
    texts = {p: key_value.get(p, f"text {number}").decode() for p in digests}
    key_value.put(f"read {number}", b"")
    for p in digests:  # nobody ends before all have read
        key_value.get(p, f"read {number}")
    other = next(p for p in digests if digests[p] != digests[0])
    raise ValueError(_difference(texts[0], texts[other], other))


def _difference(text: str, other_text: str, other: int) -> str:
    """The first line that differs, as an error says it: in one line, which all of the processes print."""
    first, second = text.splitlines(), other_text.splitlines()
    common = min(len(first), len(second))
    at = next((n for n in range(common) if first[n] != second[n]), common)
    line, other_line = (
        f"{lines[at].strip()!r}" if at < len(lines) else "missing" for lines in (first, second)
    )
    return (
        f"processes 0 and {other} have built different programs: line {at + 1} is {line} in process 0, and "
        f"{other_line} in process {other}. Every process must run the same script with the same "
        "configuration and shapes"
    )


def put_result_specs(program: int, fragment: int, mesh: Mesh, specs: Sequence[PartitionSpec]) -> None:
    """Tells the processes that are not on `mesh` how XLA sharded a fragment's results there."""
    own = holders(mesh)
    if mesh.size > 1 and len(own) < jax.process_count() and min(own) == jax.process_index():
        key_value.put(f"specs {program} {fragment}", json.dumps([list(spec) for spec in specs]).encode())


def get_result_specs(program: int, fragment: int, mesh: Mesh, count: int) -> list[PartitionSpec]:
    """How the `count` results of a fragment are sharded on a mesh of which this process has no device."""
    if mesh.size == 1:
        return [PartitionSpec()] * count
    specs = json.loads(key_value.get(min(holders(mesh)), f"specs {program} {fragment}"))
    return [PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in specs]
