"""The bytes of the arrays in buffers while a program runs, by mesh, and their peaks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mmnnx.mpmd.ir.program import Program


class LiveBytes:
    """Counts the bytes of live arrays.

    Attributes:
      now, peak: bytes by the name of a mesh.
      saved, saved_peak: those of saved activations alone.
    """

    def __init__(self, program: Program, buffers: list[Any]):
        self.program, self.buffers = program, buffers
        self.now: defaultdict[str, int] = defaultdict(int)
        self.peak: defaultdict[str, int] = defaultdict(int)
        self.saved: defaultdict[str, int] = defaultdict(int)
        self.saved_peak: defaultdict[str, int] = defaultdict(int)
        self._bytes: dict[int, int] = {}
        self.after((), program.inputs)

    def after(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """Counts what an instruction made; inputs whose buffers its results took over are gone."""
        for s in inputs:
            if self.buffers[s] is not None and self.buffers[s].is_deleted():
                self.drop(s)
        for s in outputs:
            array = self.buffers[s]
            shard = array.sharding.shard_shape(array.shape)
            self._bytes[s] = math.prod(shard) * array.dtype.itemsize * array.sharding.num_devices
            self._add(s, self._bytes[s])

    def move(self, made: Iterable[int], carries: Iterable[int]) -> None:
        """Counts what an iteration of a while made as its carries, in place of what these were."""
        for s, carry in zip(made, carries):
            self.drop(carry)
            self._bytes[carry] = self._bytes.pop(s)

    def drop(self, s: int) -> None:
        """Counts a buffer no more."""
        self._add(s, -self._bytes.pop(s, 0))

    def _add(self, s: int, change: int) -> None:
        name = self.program.names[self.program.values[s][1]]
        self.now[name] += change
        self.peak[name] = max(self.peak[name], self.now[name])
        if s in self.program.residuals:
            self.saved[name] += change
            self.saved_peak[name] = max(self.saved_peak[name], self.saved[name])
