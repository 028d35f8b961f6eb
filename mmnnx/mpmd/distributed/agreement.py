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

EXCERPT = 80
"""Characters of a line that an error shows, half of them before the first that differs."""


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
    differing = _differing(text.splitlines(), other_text.splitlines())
    # The first line of a program counts what is in it: if others differ, they say more.
    at, lines = next((found for found in differing if found[0]), differing[0])
    place = _differing(*(line or "" for line in lines))[0][0]
    line, other_line = ("missing" if line is None else repr(_excerpt(line, place)) for line in lines)
    return (
        f"processes 0 and {other} have built different programs: line {at + 1} is {line} in process 0, and "
        f"{other_line} in process {other}. Every process must run the same script with the same "
        "configuration and shapes"
    )


def _differing(some: Sequence[str], other: Sequence[str]) -> list[tuple[int, tuple[str | None, str | None]]]:
    """The numbers of the items that differ, and both; None where there are no more."""
    pairs = enumerate(itertools.zip_longest(some, other))
    return [(n, pair) for n, pair in pairs if pair[0] != pair[1]]


def _excerpt(line: str, at: int) -> str:
    """What is around a place in a line: a line of a program may be longer than a screen."""
    start, end = max(0, at - EXCERPT // 2), at + EXCERPT // 2
    return f"{'...' * (start > 0)}{line[start:end]}{'...' * (end < len(line))}"


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
