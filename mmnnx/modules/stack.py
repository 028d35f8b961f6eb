"""Layers of one kind, stacked: their Variables have a leading axis and `jax.lax.scan` runs along it.

A stack traces and compiles one layer however many there are. A pipeline needs it in segments: each stage
scans its own, with its own stacked Variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Stack(nnx.Module):
    """`length` layers of one kind, in segments that are each one `jax.lax.scan`.

    It computes what a list of such layers with the same weights computes. The weights do not depend on the
    segments: those of one seed are the same however the layers are divided.

    Attributes:
      segments: an `nnx.List` of `Segment`, for `mm.pipeline_sharding` or a TaskSharding to place one by one.

    Args:
      make_layer: `make_layer(rngs)` makes one layer. A layer maps `x`, an array or a pytree of arrays, to the
        same shapes and dtypes.
      length: number of layers.
      segments: their number, of lengths as equal as can be, or the length of each.
      rngs: where each layer's own keys are split from.
      remat: True: the backward computes a layer again rather than keep what is inside; or a policy of
        `jax.checkpoint`.

    Raises:
      ValueError: no layers, segments without layers, or lengths that do not add up to `length`.

    Example:
      >>> stack = Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 6, segments=2, rngs=nnx.Rngs(0))
      >>> stack.segments[0].layers.kernel.shape, stack(jnp.ones((4, 8))).shape
      ((3, 8, 8), (4, 8))
    """

    def __init__(
        self,
        make_layer: Callable[[nnx.Rngs], nnx.Module],
        length: int,
        *,
        segments: int | Sequence[int] = 1,
        rngs: nnx.Rngs,
        remat: Any = False,
    ):
        lengths = _lengths(length, segments)
        graphdef, keys = nnx.split(rngs.split(length))
        self.segments: Any = nnx.List()
        for start, end in pairwise(accumulate(lengths, initial=0)):
            own = jax.tree.map(lambda key: key[start:end], keys)  # noqa: B023
            self.segments.append(Segment(make_layer, end - start, nnx.merge(graphdef, own), remat))

    def __len__(self) -> int:
        """The number of layers."""
        return sum(len(segment) for segment in self.segments)

    def __call__(self, x: Any, *args: Any, cache: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Calls the layers one after the other. See `apply_layers`."""
        return apply_layers(self.segments, x, *args, cache=cache, **kwargs)

    def init_cache(self, *args: Any) -> list[Any]:
        """An empty cache for each segment; `args` are those of the layer's own `init_cache`."""
        return [segment.init_cache(*args) for segment in self.segments]


class Segment(nnx.Module):
    """Some layers of a `Stack`, run as one scan.

    Attributes:
      layers: a layer whose Variables have a leading axis, one entry for each layer; that axis is called
        "layers" among their logical names.

    Example:
      >>> stack = Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 6, segments=2, rngs=nnx.Rngs(0))
      >>> [segment.layers.kernel.shape for segment in stack.segments]
      [(3, 4, 4), (3, 4, 4)]
    """

    def __init__(self, make_layer: Callable[[nnx.Rngs], nnx.Module], length: int, rngs: nnx.Rngs, remat: Any):
        self.length, self.remat = length, remat
        named = {nnx.PARTITION_NAME: "layers"}
        self.layers: Any = nnx.vmap(make_layer, axis_size=length, transform_metadata=named)(rngs)

    def __len__(self) -> int:
        """The number of layers."""
        return self.length

    def __call__(self, x: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        """As `layer(x, *args, **kwargs)` layer by layer; `cache`, if given, is theirs stacked."""
        graphdef, state = nnx.split(self.layers)

        def one(x, inputs):
            state, cache = inputs
            before = dict(_values(state))  # the layer takes over the Variables of `state`
            layer = nnx.merge(graphdef, state)
            x, cache = _apply(layer, x, args, cache, kwargs)
            # Only what the layer wrote (BatchNorm averages, counters of keys): a scan copies its results.
            changes = {path: new for path, new in _values(nnx.state(layer)) if new is not before[path]}
            return x, (changes, cache)

        if self.remat:
            policy = self.remat if callable(self.remat) else None
            one = jax.checkpoint(one, policy=policy, prevent_cse=False)  # a scan shares nothing anyway
        x, (changes, cache) = jax.lax.scan(one, x, (state, cache))
        variables = dict(nnx.to_flat_state(nnx.state(self.layers)))
        for path, new in changes.items():
            variables[path].set_value(new)
        return x if cache is None else (x, cache)

    def init_cache(self, *args: Any) -> Any:
        """The layers' empty caches, stacked."""
        empty = self.layers.init_cache(*args)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.length, *leaf.shape)), empty)


def apply_layers(
    layers: Sequence[nnx.Module],
    x: Any,
    *args: Any,
    cache: Sequence[Any] | None = None,
    remat: Any = False,
    **kwargs: Any,
) -> Any:
    """Calls layers in turn: `x = layer(x, *args, **kwargs)`.

    Args:
      layers: layers or segments of layers.
      x: an array or a pytree of arrays, the input of the first.
      *args, **kwargs: what each is given besides.
      cache: one for each, which it is given as `cache=` and returns changed: `x, new = layer(x, cache=old)`.
      remat: True: the backward computes each layer again rather than keep what is inside; or a policy of
        `jax.checkpoint`.

    Returns:
      What the last returns, without a cache; with one, (x, the new caches).

    Example:
      >>> layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)]
      >>> apply_layers(layers, jnp.ones((4, 8))).shape
      (4, 8)
    """
    call = _apply
    if remat:
        call = nnx.remat(_apply, policy=remat if callable(remat) else None)
    if cache is None:
        for layer in layers:
            x, _ = call(layer, x, args, None, kwargs)
        return x
    new = []
    for layer, old in zip(layers, cache, strict=True):
        x, out = call(layer, x, args, old, kwargs)
        new.append(out)
    return x, new


def _apply(layer: Any, x: Any, args: tuple, cache: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if cache is None:
        return layer(x, *args, **kwargs), None
    return layer(x, *args, cache=cache, **kwargs)


def _values(state: nnx.State) -> list[tuple[tuple, Any]]:
    return [(path, variable.get_raw_value()) for path, variable in nnx.to_flat_state(state)]


def _lengths(length: int, segments: int | Sequence[int]) -> list[int]:
    if length < 1:
        raise ValueError(f"a Stack has at least one layer, not {length}")
    if isinstance(segments, int):
        if not 1 <= segments <= length:
            raise ValueError(f"{length} layers cannot be divided into {segments} segments")
        ends = [length * n // segments for n in range(segments + 1)]
        return [end - start for start, end in pairwise(ends)]
    if min(segments, default=0) < 1 or sum(segments) != length:
        raise ValueError(f"segments of {', '.join(map(str, segments))} layers do not make {length} layers")
    return list(segments)
