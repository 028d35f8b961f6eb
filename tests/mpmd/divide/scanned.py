"""Models whose layers are stacked and scanned, as users write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.fuzz.layers import KINDS, WIDTH

WAYS = ("nnx.scan", "lax.scan", "remat", "in pairs", "backwards", "with losses", "in a call")


class Scanned(nnx.Module):
    """A layer, stacks of layers, and a layer again.

    Args:
      kinds: for each stack, what its layers are (`tests.fuzz.layers.KINDS`).
      depth: how many layers are in each.
      way: how they are scanned, one of WAYS.
    """

    def __init__(self, kinds: tuple[str, ...], depth: int, way: str = "nnx.scan", *, rngs: nnx.Rngs):
        self.way, self.depth = way, depth
        self.first = nnx.Linear(8, WIDTH, rngs=rngs)
        self.stacks = nnx.List(stack(kind, depth, rngs) for kind in kinds)
        self.last = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x, extra = self.first(x), 0.0
        for layers in self.stacks:
            if self.way == "with losses":
                x, losses = scan_with_losses(layers, x)
                extra = extra + jnp.mean(losses) + 0.1 * jnp.max(losses)
            else:
                x = SCANS[self.way](layers, x)
        return self.last(x) + extra


def stack(kind: str, depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """Layers whose Variables have a leading dimension."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return KINDS[kind](rngs=rngs)

    return make(rngs)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def _scan(layer, x):
    return layer(x)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
@nnx.remat
def _scan_with_remat(layer, x):
    return layer(x)


@nnx.jit
def _scan_in_a_call(layers, x):
    return _scan(layers, x)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
def scan_with_losses(layer, x):
    y = layer(x)
    return y, jnp.mean(y**2)


def _lax_scan(layers: nnx.Module, x: jax.Array, **options: Any) -> jax.Array:
    graph, state = nnx.split(layers)

    def one(x, state):
        layer = nnx.merge(graph, state)
        return layer(x), nnx.state(layer)

    x, state = jax.lax.scan(one, x, state, **options)
    nnx.update(layers, state)
    return x


def _scan_in_pairs(layers: nnx.Module, x: jax.Array) -> jax.Array:
    """Two layers in each step."""
    graph, state = nnx.split(layers)
    pairs = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // 2, 2, *leaf.shape[1:]), state)

    def two(x, pair):
        after = []
        for n in range(2):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf, n=n: leaf[n], pair), copy=True)
            x = layer(x)
            after.append(nnx.state(layer))
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)

    x, state = jax.lax.scan(two, x, pairs)
    nnx.update(layers, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), state))
    return x


SCANS = {
    "nnx.scan": _scan,
    "lax.scan": _lax_scan,
    "remat": _scan_with_remat,
    "in pairs": _scan_in_pairs,
    "backwards": lambda layers, x: _lax_scan(layers, x, reverse=True),
    "in a call": _scan_in_a_call,
}
