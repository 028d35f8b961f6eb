"""What the experts of a mixture do: each takes the tokens that were sent to it, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mmnnx.modules.grouped_matmul import grouped_matmul
from mmnnx.sharding.logical_shard_map import Layout, logical_shard_map

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def dropless(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Activation,
    names: tuple[str | None, str | None] = ("expert", "mlp"),
) -> jax.Array:
    """The weighted sums of what each token's experts make of it; an expert takes all that come.

    Tokens are sorted by expert, so that those of one are neighbours (MegaBlocks, arXiv:2211.15841). Over the
    devices of a task experts and their hidden features are divided as the names say: each device sorts out
    the tokens of its own experts, and what the devices make is added up. Tokens are divided over all other
    axes. The backward computes the hidden features again.

    Args:
      x: [batch, sequence, width].
      weights: [batch, sequence, top_k], how the experts of a token count.
      chosen: int32 [batch, sequence, top_k], their numbers.
      gate, up: [experts, width, mlp], in the dtype of `x`.
      down: [experts, mlp, width], in the dtype of `x`.
      activation: from the products with `gate` and `up` to the hidden features.
      names: the logical names of the experts and of their hidden features.

    Returns:
      [batch, sequence, width].
    """
    layout = _layout(*names, tokens=("batch", "sequence", None), integers=1)
    numbers = jnp.arange(gate.shape[0])
    args = (x, weights, chosen, numbers, gate, up, down)
    return logical_shard_map(_Dropless(activation, gate.shape[0]), layout, *args)[0]


def with_capacity(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    slots: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    capacity: int,
    activation: Activation,
    names: tuple[str | None, str | None] = ("expert", "mlp"),
) -> jax.Array:
    """The same, where an expert takes `capacity` tokens of each row of the batch (arXiv:2006.16668).

    Args:
      slots: int32 [batch, sequence, top_k], the place of a token among those of its expert, from 0. From
        `capacity` on it gets nothing.
      capacity: tokens of a row that an expert takes.
      x, weights, chosen, gate, up, down, activation, names: as in `dropless`.
    """
    layout = _layout(*names, tokens=("batch", None, None), integers=2)
    numbers = jnp.arange(gate.shape[0])
    args = (x, weights, chosen, slots, numbers, gate, up, down)
    return logical_shard_map(_WithCapacity(activation, capacity), layout, *args)[0]


def _layout(expert: str | None, mlp: str | None, tokens: tuple[str | None, ...], integers: int) -> Layout:
    into = (expert, None, mlp)
    return Layout(
        names=tuple(name for name in (expert, mlp, tokens[1], tokens[0]) if name),
        operands=(*[tokens] * (2 + integers), (expert,), into, into, (expert, mlp, None)),
        results=(tokens,),
    )


@dataclasses.dataclass(frozen=True)
class _Dropless:
    """`dropless` for some of all experts: those with these numbers, which follow each other."""

    activation: Activation
    all_experts: int

    def __call__(
        self,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        numbers: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array]:
        (experts,), top_k = numbers.shape, chosen.shape[-1]
        expert = (chosen - numbers[0]).reshape(-1)
        expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)  # those of others come last
        order = jnp.argsort(expert)
        place = jnp.argsort(order)
        sizes = jnp.zeros(experts, jnp.int32).at[expert].add(1, mode="drop")
        rows = _take(x.reshape(-1, x.shape[-1]), order, place, top_k)
        product = lambda rows, w: grouped_matmul(rows, w, sizes, self.all_experts // experts)
        hidden = self.activation(product(rows, gate), product(rows, up))
        made = _take(product(hidden, down), place, order, 1)
        return (_weighted(made, weights),)


@dataclasses.dataclass(frozen=True)
class _WithCapacity:
    """`with_capacity` for the experts with these numbers, which follow each other."""

    activation: Activation
    capacity: int

    def __call__(
        self,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        slots: jax.Array,
        numbers: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array]:
        (batch, _, top_k), (experts,), capacity = chosen.shape, numbers.shape, self.capacity
        expert = chosen - numbers[0]
        kept = (expert >= 0) & (expert < experts) & (slots < capacity)
        place = jnp.where(kept, expert * capacity + slots, experts * capacity).reshape(batch, -1)
        assignments = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
        empty = jnp.full((batch, experts * capacity), place.shape[1])
        order = jax.vmap(lambda e, p, a: e.at[p].set(a, mode="drop"))(empty, place, assignments)
        rows = jax.vmap(partial(_take, count=top_k))(x, order, place)
        rows = rows.reshape(batch, experts, capacity, -1)
        into = lambda w: jnp.einsum("becd,edm->becm", rows, w)
        made = jnp.einsum("becm,emd->becd", self.activation(into(gate), into(up)), down)
        made = jax.vmap(partial(_take, count=1))(made.reshape(batch, experts * capacity, -1), place, order)
        return (_weighted(made, weights),)


def _weighted(made: jax.Array, weights: jax.Array) -> jax.Array:
    made = made.reshape(*weights.shape, -1)
    summed = jnp.einsum("bskd,bsk->bsd", made, weights.astype(made.dtype), preferred_element_type=jnp.float32)
    return summed.astype(made.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x: jax.Array, index: jax.Array, back: jax.Array, count: int) -> jax.Array:
    """Rows of x by `index // count`, and zeros where it is out of bounds.

    Args:
      back: for each row of x, one after the other, the `count` places in `index` that name it. With them the
        backward is a gather as well, where XLA would scatter, which is slow.
    """
    return jnp.take(x, index // count, axis=0, mode="fill", fill_value=0)


def _take_forward(x: jax.Array, index: jax.Array, back: jax.Array, count: int) -> tuple[jax.Array, Any]:
    return _take(x, index, back, count), back


def _take_backward(count: int, back: jax.Array, ct: jax.Array) -> tuple[jax.Array, None, None]:
    rows = jnp.take(ct, back, axis=0, mode="fill", fill_value=0)
    return rows.reshape(-1, count, ct.shape[-1]).sum(1), None, None


_take.defvjp(_take_forward, _take_backward)
