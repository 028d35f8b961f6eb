"""XLA's text of a compiled fragment, as instructions: what runs how often."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from mmnnx.mpmd.ir.flops import expected_iterations

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:body|calls|to_apply|called_computations|\w+_computation)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":?\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_SPACE = re.compile(r"S\((\d+)\)")

CALLS = ("while", "call", "conditional", "async-start", "fusion")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as XLA writes it: `f32[8,4]{1,0:T(8,128)S(1)}`; that of one device.

    Attributes:
      dtype: in XLA's words, such as "f32" and "bf16".
      sizes: of its dimensions.
      space: the number of the memory that it is in; 0 is the device's own, 1 on TPUs that of the core.
    """

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["8"])[0])
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      arrays: the result; several of a tuple.
      opcode: what it does.
      operands: the names of what it takes.
      line: all of it.
      is_root: whether its result is that of the computation.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def parameter(self) -> int | None:
        """Which argument of its computation it is; None if it is none."""
        number = _PARAMETER.search(self.line) if self.opcode == "parameter" else None
        return int(number[1]) if number else None

    def called(self) -> list[str]:
        """The computations that it runs."""
        if self.opcode not in CALLS:
            return []
        if branches := _BRANCHES.search(self.line):
            return re.findall(r"[\w.\-]+", branches[1])
        return _CALLED.findall(self.line)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Hlo:
    """A compiled program, for one device.

    Attributes:
      computations: their instructions in order, by name.
      entry: the name of the one that runs.
    """

    computations: dict[str, Computation]
    entry: str

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """The names of the computations that are inside of fusions."""
        every = (i for computation in self.computations.values() for i in computation.values())
        return frozenset(name for i in every if i.opcode == "fusion" for name in i.called())

    def total(
        self,
        of: Callable[[Instruction, str], Counter[Any]],
        start: str | None = None,
        into_fusions: bool = True,
        size: Callable[[Any], float] = lambda key: 1.0,
    ) -> Counter[Any]:
        """The sum over all instructions that run; in loops, times their iterations.

        Args:
          of: what an instruction comes to; it gets the name of its computation too.
          start: the computation whose instructions these are. Default: the one that runs.
          into_fusions: whether the instructions inside a fusion count, beside the fusion.
          size: of what is counted; of a conditional the largest branch counts.
        """

        @functools.cache
        def sum_of(name: str) -> Counter[Any]:
            found: Counter[Any] = Counter()
            computation = self.computations.get(name, {})
            for i in computation.values():
                found.update(of(i, name))
                if i.opcode == "fusion" and not into_fusions:
                    continue
                inner = [sum_of(called) for called in i.called()]
                if i.opcode == "conditional":
                    inner = [max(inner, key=lambda branch: sum(size(key) * n for key, n in branch.items()))]
                trips = self._trips(i, computation) if i.opcode == "while" else None
                times = 1 if trips is None else trips
                for one in inner:
                    found.update({key: times * n for key, n in one.items()})
            return found

        return sum_of(self.entry if start is None else start)

    def uncounted_loops(self) -> list[Instruction]:
        """Those whose iterations cannot be told, as they may depend on values: `total` takes one of each."""
        every = ((i, c) for c in self.computations.values() for i in c.values() if i.opcode == "while")
        return [i for i, computation in every if self._trips(i, computation) is None]

    def iterations_on_values(self) -> int:
        """Of loops whose end depends on values, as far as `total` counts them."""

        def of(i: Instruction, name: str) -> Counter[str]:
            if i.opcode != "while" or self._counted(i, self.computations[name]) is not None:
                return Counter()
            return Counter({"": expected_iterations(i.line) or 1})

        return self.total(of)[""]

    def _trips(self, loop: Instruction, computation: Computation) -> int | None:
        """The iterations of a loop; None if it cannot be told."""
        counted = self._counted(loop, computation)
        return expected_iterations(loop.line) if counted is None else counted

    def _counted(self, loop: Instruction, computation: Computation) -> int | None:
        """The iterations of a loop; None if they depend on values, or XLA's text does not say."""
        if known := _TRIPS.search(loop.line):
            return int(known[1])
        # Not all compilers say it: a counter is compared with the limit, each a constant or carried.
        condition = self.computations.get((_CONDITION.search(loop.line) or ["", ""])[1], {})
        compare = _root(condition)
        numbers: tuple[str, ...] = compare.operands if compare else ()
        if compare is not None and compare.opcode == "fusion":  # of the comparison alone
            inside = self.computations[compare.called()[0]]
            places = {i.name: i.parameter for i in inside.values()}
            compare = _root(inside)
            taken = compare.operands if compare else ()
            numbers = tuple(numbers[n] for n in map(places.get, taken) if n is not None)
        if compare is None or "direction=LT" not in compare.line or len(numbers) != 2:
            return None
        carried = computation.get(loop.operands[0])

        def value(name: str, within: Computation) -> int | None:
            i = within.get(name)
            if i is None:
                return None
            if i.opcode == "constant":
                return int(n[1]) if (n := re.search(r"constant\((-?\d+)\)", i.line)) else None
            if i.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
                return value(i.operands[0], within)
            if i.opcode == "get-tuple-element" and within is condition and carried is not None:
                index = int((re.search(r"index=(\d+)", i.line) or ["", "0"])[1])
                return value(carried.operands[index], computation) if carried.opcode == "tuple" else None
            return None

        first, limit = (value(name, condition) for name in numbers)
        return None if first is None or limit is None else max(limit - first, 0)


def _root(computation: Computation) -> Instruction | None:
    """The instruction whose result is that of the computation."""
    return next((i for i in computation.values() if i.is_root), None)


def parse(text: str) -> Hlo:
    """The instructions of a program, from what XLA writes of it."""
    computations: dict[str, Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = start[2]
            computations[current] = {}
            entry = current if start[1] else entry
        elif current and (parts := _INSTRUCTION.match(line)):
            root, name, shape, opcode = parts.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", _parenthesized(line, parts.end())))
            found = Instruction(name, _arrays(shape), opcode, operands, line, bool(root))
            computations[current][name] = found
    return Hlo(computations, entry)


def _parenthesized(line: str, start: int) -> str:
    """What is from a place up to the parenthesis that closes."""
    depth = 1
    for end in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        if not depth:
            return line[start:end]
    return line[start:]


def _arrays(shape: str) -> tuple[Array, ...]:
    return tuple(
        Array(
            dtype,
            tuple(int(n) for n in sizes.split(",") if n),
            int((_SPACE.search(layout) or ["", "0"])[1]),
        )
        for dtype, sizes, layout in _ARRAY.findall(shape)
    )
