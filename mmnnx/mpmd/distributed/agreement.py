"""What processes compare and tell each other about a program while they build and compile it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mmnnx.mpmd.distributed import key_value, progress
from mmnnx.mpmd.distributed.processes import holders

_programs, _comparisons = itertools.count(1), itertools.count(1)

_BLOCK = 2**16  # numbers that are compared at once
_BLOCKS = 16  # of a large array so many are, which takes hundredths of a second

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


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells the values of an array from others.

    Attributes:
      what: what the array is, in words.
      numbers: a checksum; of floats also two sums, as one processor may round otherwise than another, and the
        checksum is of what is not finite.
      near: how far the sums of equal values may be apart.
    """

    what: str
    numbers: list[float]
    near: float


def _fingerprint(what: str, x: Any) -> Fingerprint:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"{what} is an array on a device of another process. Give each process its value, as a NumPy "
            "array, or place it on a mesh of the program, by a NamedSharding"
        )
    dtype = jax.typeof(x).dtype
    flat = np.ravel(jax.random.key_data(x) if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else x)
    if not jax.dtypes.issubdtype(flat.dtype, np.inexact) or flat.itemsize == 1:
        return Fingerprint(what, [zlib.crc32(b"".join(block.tobytes() for block in _blocks(flat)))], 0)
    sums, checksum = np.zeros(3), 0
    for part in (flat.real, flat.imag) if np.iscomplexobj(flat) else (flat,):
        for block in _blocks(part):
            values = block.astype(np.float64)
            odd = ~np.isfinite(values)
            if odd.any():
                kinds = np.where(odd, np.nan_to_num(values, posinf=1, neginf=-1), 2)
                checksum = zlib.crc32(kinds.tobytes(), checksum)
                values[odd] = 0
            values = values.clip(-1e99, 1e99)  # squares of more would be infinite
            sums += values @ _weights()[: values.size], np.abs(values).sum(), np.square(values).sum()
    # Roundings are of both signs, and add up as the square root of their number does.
    near = (2 * float(jnp.finfo(dtype).eps) + 1e-5) * math.sqrt(sums[2])
    return Fingerprint(what, [checksum, *sums[:2].tolist()], near)


def _differ(numbers: Sequence[float], others: Sequence[float], near: float) -> bool:
    return numbers[0] != others[0] or any(abs(a - b) > near for a, b in zip(numbers[1:], others[1:]))


def _blocks(flat: np.ndarray) -> list[np.ndarray]:
    """All blocks of an array, or some that are spread over it: others would differ in one of them."""
    starts = range(0, flat.size, _BLOCK)
    return [flat[start : start + _BLOCK] for start in starts[:: max(1, -(-len(starts) // _BLOCKS))]]


@functools.cache
def _weights() -> np.ndarray:
    """What numbers of a block are multiplied with before they are summed, so that another order differs."""
    return np.cos(np.arange(_BLOCK))


def check_same_values(program: int, values: Iterable[tuple[str, Any]], name: str) -> None:
    """Checks that all processes give a program the same values of what each has a copy of.

    Args:
      program: by which number all know the program.
      values: what each is, in words, and the array or number.
      name: of the function that it is of, for messages.

    Raises:
      ValueError: if a process has others, with the first that differs; or an array that others alone have.
    """
    own, key = [_fingerprint(*value) for value in values], f"values {program} {next(_comparisons)}"
    key_value.put(key, json.dumps([one.numbers for one in own]).encode())
    found = [json.loads(key_value.get(p, key)) for p in range(jax.process_count())]
    for process, of_other in enumerate(found):
        for one, first, other in zip(own, found[0], of_other):
            if _differ(first, other, one.near):
                raise ValueError(
                    f"{one.what} of {name} has other values in process {process} than in process 0. What is "
                    "not placed must be the same in every process: the whole batch, and random values of one "
                    "seed"
                )


def _difference(text: str, other_text: str, other: int) -> str:
    """The first line that differs, as an error says it: in one line, which all of the processes print."""
    differing = _differing(text.splitlines(), other_text.splitlines())
    # The first line of a program counts what is in it: if others differ, they say more.
    at, lines = next((found for found in differing if found[0]), differing[0])
    if any(
        line and line.endswith("[") for line in lines
    ):  # JAX writes several parameters on lines of their own
        lines = (_joined(text, at), _joined(other_text, at))
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


def _joined(text: str, at: int) -> str:
    """A line and those after it as one, with spaces as JAX writes them in one."""
    return " ".join(line.strip() for line in text.splitlines()[at:]).replace("[ ", "[").replace(" ]", "]")


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
