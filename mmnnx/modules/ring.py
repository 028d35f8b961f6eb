"""The devices that have the parts of a sequence, and what they send each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mmnnx.modules.blockwise_attention import from_tiles, in_tiles, tile_size


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that have the parts of a sequence.

    Attributes:
      axes: the mesh axes that they are along.
      parts: how many they are.
      hops: how far keys go.
      length: tokens of a part.
      zigzag: whether each device computes with two halves of parts: of the 2 * parts halves in order, those
        with number n and 2 * parts - 1 - n, of which the even one is first.
    """

    axes: tuple[str, ...]
    parts: int
    hops: int
    length: int
    zigzag: bool

    @classmethod
    def of(cls, axes: tuple[str, ...], length: int, causal: bool, window: int | None) -> Ring:
        """For attention of so many tokens of each device; within a shard_map, or without axes."""
        parts = math.prod(lax.axis_size(axis) for axis in axes)
        hops = parts - 1
        if causal and window is not None:
            hops = min(hops, (window + length - 2) // length)
        zigzag = causal and 0 < hops == parts - 1 and length % 2 == 0
        return cls(axes, parts, hops, length, zigzag)

    @property
    def number(self) -> jax.Array:
        """Of this device."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    @property
    def piece(self) -> int:
        """Tokens that follow each other."""
        return self.length // 2 if self.zigzag else self.length

    def starts(self, number: jax.Array) -> jax.Array:
        """The positions at which the tiles of a device start: int32 [tiles]."""
        pieces = number[None]
        if self.zigzag:
            other = 2 * self.parts - 1 - number
            pieces = jnp.where(number % 2 == 0, jnp.stack([number, other]), jnp.stack([other, number]))
        return (pieces[:, None] * self.piece + jnp.arange(0, self.piece, tile_size(self.piece))).ravel()

    def deal(self, *arrays: jax.Array) -> list[jax.Array]:
        """The parts [batch, length, ...] as what the device computes with, in tiles."""
        dealt = [self._exchange(x, back=False) for x in arrays] if self.zigzag else arrays
        return [in_tiles(x, tile_size(self.piece)) for x in dealt]

    def collect(self, *arrays: jax.Array) -> list[jax.Array]:
        """The reverse of `deal`."""
        found = [from_tiles(x) for x in arrays]
        return [self._exchange(x, back=True) for x in found] if self.zigzag else found

    def _exchange(self, x: jax.Array, back: bool) -> jax.Array:
        halves = []
        for odd, half in enumerate(jnp.split(x, 2, axis=1)):
            there = [min(n, 2 * self.parts - 1 - n) for n in range(odd, 2 * self.parts, 2)]
            pairs = [(b, a) if back else (a, b) for a, b in enumerate(there)]
            halves.append(lax.ppermute(half, self.axes, pairs))
        return jnp.concatenate(halves, axis=1)

    def send(self, arrays: Any, by: int) -> Any:
        """What each device has, to the one that is so many places further on."""
        if by % self.parts == 0:
            return arrays
        pairs = [(n, (n + by) % self.parts) for n in range(self.parts)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), arrays)

    def turn(self, add: Callable[[Any, Any, jax.Array], tuple[Any, Any]], sums: Any, moving: Any) -> Any:
        """Has what moves visit the devices.

        Args:
          add: from sums, what is here and the number of the device that it came from, to both anew.
          sums: what stays.
          moving: what goes around, first that of the device itself.

        Returns:
          The sums, and what is here in the end.
        """

        def step(both: Any, hop: jax.Array) -> tuple[Any, None]:
            sums, moving = both
            sums, moving = add(sums, moving, (self.number - hop) % self.parts)
            return (sums, self.send(moving, 1)), None

        if self.hops:
            (sums, moving), _ = lax.scan(step, (sums, moving), jnp.arange(self.hops))
        return add(sums, moving, (self.number - self.hops) % self.parts)
