"""Low-rank adaptation (LoRA, arXiv:2106.09685): a model trains small additions to its linear layers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.modules.linear import Linear
from mmnnx.sharding.divided_array import DividedArray, named_sharding, sharding_of
from mmnnx.sharding.held_parts import array_of_parts, held_parts

KEPT = ("head", "router")  # linear layers that are left as they are, if no filter says otherwise


class LoRALinear(Linear):
    """A linear layer with a low-rank addition: `base(x) + alpha / rank * (x @ lora_a) @ lora_b`.

    Its kernel and bias are those of the layer that it is made of, under the same names. `lora_a`
    [in_features, rank] and `lora_b` [rank, out_features], zeros at first, are `nnx.LoRAParam`s; stacked
    layers have a leading dimension. `lora` makes them.

    Example:
      >>> layer = lora(nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0))), rank=2).layers[0]
      >>> type(layer).__name__, layer.lora_a.shape, layer.lora_b.shape
      ('LoRALinear', (4, 2), (2, 8))
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam

    def __init__(self, base: nnx.Linear, rank: int, alpha: float, seed: int):
        for name, value in vars(base).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.rank, self.alpha = rank, alpha
        kernel = base.kernel.get_raw_value()
        *stack, inputs, outputs = kernel.shape
        bound = 1 / math.sqrt(inputs)
        random = np.random.default_rng(seed)
        self.lora_a = _beside(
            base.kernel, (*stack, inputs, rank), lambda shape: random.uniform(-bound, bound, shape), -1
        )
        self.lora_b = _beside(base.kernel, (*stack, rank, outputs), np.zeros, -2)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in_features] to [..., out_features]."""
        y = super().__call__(inputs, out_sharding)
        a, b = (v[...].astype(y.dtype) for v in (self.lora_a, self.lora_b))
        return y + (self.alpha / self.rank) * ((inputs.astype(y.dtype) @ a) @ b)


def lora(
    model: nnx.Module,
    rank: int,
    filter: Callable[[tuple[Any, ...], Any], bool] | None = None,
    *,
    alpha: float | None = None,
    seed: int = 0,
) -> nnx.Module:
    """Adds a low-rank addition to linear layers of a model, which gives the same results at first.

    Train with `nnx.Optimizer(model, rule, wrt=nnx.LoRAParam)` and
    `nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))`: other weights have no gradients
    and no optimizer state. The additions live where their layers do, sharded like them.

    Args:
      model: concrete and placed, or abstract; it is changed in place.
      rank: of the additions.
      filter: which layers, by `filter(path, layer)`, such as `mm.path(..., {"query", "value"})`. Default: all
        `nnx.Linear` but those called "head" and "router". A layer that the model has in several
        places is chosen by the first of them, and stays shared.
      alpha: the additions count `alpha / rank` times. Default: twice the rank.
      seed: of the initial values. Those of a layer depend on it and on the layer's path.

    Returns:
      The model.

    Raises:
      ValueError: a rank below one, no such layer, or layers that have additions already.
      TypeError: for a layer of a class with a `__call__` of its own, which the addition would replace.

    Example:
      >>> model = lora(nnx.List([nnx.Linear(8, 16, rngs=nnx.Rngs(0))]), rank=2)
      >>> model[0].lora_a.shape, model[0].lora_b.shape
      ((8, 2), (2, 16))
    """
    if rank < 1:
        raise ValueError(f"lora: rank={rank}: an addition has a rank of one or more")
    wanted = filter or (lambda path, layer: path[-1] not in KEPT)
    modules = [(path, m) for path, m in nnx.iter_modules(model) if path and isinstance(m, nnx.Linear)]
    chosen = [(path, layer) for path, layer in modules if wanted(path, layer)]
    if not chosen:
        known = sorted({str(path[-1]) for path, _ in modules})
        there = (
            f"the linear layers are called {', '.join(known)}" if known else "the model has no linear layers"
        )
        raise ValueError(f"lora: there is no such layer; {there}")
    own: dict[int, LoRALinear] = {}
    for path, layer in chosen:
        name, cls = ".".join(map(str, path)), type(layer)
        if isinstance(layer, LoRALinear):
            raise ValueError(f"lora: {name} has an addition already")
        if cls.__call__ not in (nnx.Linear.__call__, Linear.__call__):
            raise TypeError(
                f"lora: {name} is a {cls.__name__}, whose __call__ an addition would replace: leave it out "
                "with filter="
            )
        own[id(layer)] = LoRALinear(
            layer, rank, 2 * rank if alpha is None else alpha, zlib.crc32(name.encode(), seed)
        )
    for node in [node for _, node in nnx.iter_graph(model)]:
        for key, child in _compat.children(node):
            if id(child) in own and isinstance(node, nnx.List | nnx.Dict | list | dict):
                node[key] = own[id(child)]
            elif id(child) in own:
                setattr(node, key, own[id(child)])
    return model


def _beside(
    kernel: nnx.Variable, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], np.ndarray], dim: int
) -> nnx.LoRAParam:
    """A parameter that lives where a kernel does, sharded like it but in the dimension of the rank."""
    like = kernel.get_raw_value()
    names = kernel.get_metadata().get("out_sharding")
    metadata: dict[str, Any] = {}
    if names:
        metadata = dict(out_sharding=_without(names, dim, len(shape)), eager_sharding=False)
    if isinstance(like, jax.ShapeDtypeStruct) or not isinstance(like, jax.Array):
        return nnx.LoRAParam(jax.ShapeDtypeStruct(shape, like.dtype), **metadata)
    value, named = np.asarray(make(shape), like.dtype), named_sharding(like)
    if named is None or not (like.committed or isinstance(like, DividedArray)):
        return nnx.LoRAParam(jnp.asarray(value), **metadata)
    spec = PartitionSpec(*_without(tuple(named.spec), dim, len(shape)))
    sharding = sharding_of(NamedSharding(named.mesh, spec))
    parts = dict.fromkeys(held_parts(sharding, shape).values())
    hosts = {part: value[tuple(slice(*b) for b in part)] for part in parts}
    return nnx.LoRAParam(array_of_parts(shape, like.dtype, sharding, hosts), **metadata)


def _without(entries: tuple[Any, ...], dim: int, ndim: int) -> tuple[Any, ...]:
    """The entries for each dimension, None for one of them."""
    full = [*entries, *[None] * (ndim - len(entries))]
    full[dim] = None
    return tuple(full)
