"""What the experts of a mixture do: each takes the tokens that were sent to it, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from mmnnx.modules.grouped_matmul import grouped_matmul, grouped_outer_product
from mmnnx.sharding.logical_shard_map import Dims, Layout, logical_shard_map

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Names = tuple[str | None, str | None]


def dropless(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Activation,
    names: Names = ("expert", "mlp"),
) -> jax.Array:
    """The weighted sums of what each token's experts make of it; an expert takes all that come.

    Tokens are sorted by expert, so that those of one are neighbours (MegaBlocks, arXiv:2211.15841). Over the
    devices of a task experts and their hidden features are divided as the names say: each device sorts out
    the tokens of its own experts, and what the devices make is added up. Tokens are divided over all other
    axes. The backward computes the hidden features again: to be kept they would need, on each device, room
    for all tokens.

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
    numbers = jnp.arange(gate.shape[0])
    experts = _Dropless(activation, gate.shape[0])
    return _weighted_sums(experts, names, (x, weights, chosen, numbers, gate, up, down))


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
    names: Names = ("expert", "mlp"),
) -> jax.Array:
    """The same, where an expert takes `capacity` tokens of each row of the batch (arXiv:2006.16668).

    The backward reads the hidden features that the forward computed.

    Args:
      slots: int32 [batch, sequence, top_k], the place of a token among those of its expert, from 0. From
        `capacity` on it gets nothing.
      capacity: tokens of a row that an expert takes.
      x, weights, chosen, gate, up, down, activation, names: as in `dropless`.
    """
    numbers = jnp.arange(gate.shape[0])
    experts = _WithCapacity(activation, capacity)
    return _weighted_sums(experts, names, (x, weights, chosen, slots, numbers, gate, up, down))


# -------------------------------------------------------------------------------- over the devices of a task


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted_sums(experts: _Experts, names: Names, args: tuple[jax.Array, ...]) -> jax.Array:
    tokens, operands = experts.dims(names, len(args))
    return logical_shard_map(experts, _layout(names, operands, (tokens,)), *args)[0]


def _forward(experts: _Experts, names: Names, args: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    tokens, operands = experts.dims(names, len(args))
    kept = experts.kept_dims(names)
    if not kept:
        return _weighted_sums(experts, names, args), (args, ())
    y, *hidden = logical_shard_map(_Forward(experts), _layout(names, operands, (tokens, *kept)), *args)
    return y, (args, tuple(hidden))


def _backward(experts: _Experts, names: Names, saved: Any, ct: jax.Array) -> tuple[Any]:
    args, hidden = saved
    tokens, operands = experts.dims(names, len(args))
    given, results = (*operands, *experts.kept_dims(names), tokens), (*operands[:2], *operands[-3:])
    gradients = _Gradients(experts, len(hidden))
    x, weights, *kernels = logical_shard_map(gradients, _layout(names, given, results), *args, *hidden, ct)
    return ((x, weights, *[None] * (len(args) - 5), *kernels),)


_weighted_sums.defvjp(_forward, _backward)


def _layout(names: Names, operands: tuple[Dims, ...], results: tuple[Dims, ...]) -> Layout:
    batch, sequence, _ = operands[0]
    return Layout(tuple(name for name in (*names, sequence, batch) if name), operands, results)


# --------------------------------------------------------------------------------------------- on one device


class _Routes(NamedTuple):
    """Rows for the experts of a device, and their products with the matrices of these.

    Attributes:
      to_rows: of values [batch, n, features], each of which so many assignments have; without one, zeros.
      to_assignments: rows as [batch, sequence, top_k, features]; zeros for experts of other devices.
      product: of rows [..., in] with [experts, in, out].
      transposed: of rows [..., out] with the same, transposed.
      outer_product: of rows [..., in] with rows [..., out]: [experts, in, out].
    """

    to_rows: Callable[[jax.Array, int], jax.Array]
    to_assignments: Callable[[jax.Array], jax.Array]
    product: Callable[[jax.Array, jax.Array], jax.Array]
    transposed: Callable[[jax.Array, jax.Array], jax.Array]
    outer_product: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Experts:
    """Some of all experts: those with the numbers that are given, which follow each other.

    Operands are x, weights, integers of each assignment, the numbers, and the three kernels.
    """

    activation: Activation

    def __call__(self, *args: jax.Array) -> tuple[jax.Array]:
        return (self.forward(*args)[0],)

    def forward(self, x: jax.Array, weights: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        """The weighted sums; and what the backward may keep, the products with `gate` and `up`."""
        *integers, gate, up, down = others
        routes = self.routes(*integers)
        rows = routes.to_rows(x, weights.shape[-1])
        gated, upped = routes.product(rows, gate), routes.product(rows, up)
        made = routes.to_assignments(routes.product(self.activation(gated, upped), down))
        weights = weights.astype(made.dtype)
        y = jnp.einsum("bskd,bsk->bsd", made, weights, preferred_element_type=jnp.float32)
        return y.astype(made.dtype), gated, upped

    def gradients(
        self, args: tuple[jax.Array, ...], kept: tuple[jax.Array, ...], ct: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Those of x, weights and the kernels."""
        x, weights, *integers, gate, up, down = args
        routes, top_k = self.routes(*integers), weights.shape[-1]
        rows, cts = routes.to_rows(x, top_k), routes.to_rows(ct, top_k)
        of_row = routes.to_rows(weights.reshape(weights.shape[0], -1, 1), 1)
        hidden, to_products = jax.vjp(
            self.activation, *(kept or (routes.product(rows, gate), routes.product(rows, up)))
        )
        # A row makes weight x hidden x down. So the gradient of its weight needs no product with `down`.
        back = routes.transposed(cts, down)
        exact = jnp.promote_types(hidden.dtype, jnp.float32)
        of_weights = jnp.einsum("...m,...m->...", hidden, back, preferred_element_type=exact)[..., None]
        gated, upped = to_products((back * of_row).astype(hidden.dtype))
        of_rows = routes.transposed(gated, gate) + routes.transposed(upped, up)
        return (
            routes.to_assignments(of_rows).sum(2),
            routes.to_assignments(of_weights)[..., 0].astype(weights.dtype),
            routes.outer_product(rows, gated),
            routes.outer_product(rows, upped),
            routes.outer_product(hidden, (cts * of_row).astype(cts.dtype)),
        )

    def dims(self, names: Names, count: int) -> tuple[Dims, tuple[Dims, ...]]:
        """The names of the dimensions of x, and of all `count` operands."""
        expert, mlp = names
        into, out_of = (expert, None, mlp), (expert, mlp, None)
        return self.tokens, (*[self.tokens] * (count - 4), (expert,), into, into, out_of)

    tokens: ClassVar[Dims]

    def kept_dims(self, names: Names) -> tuple[Dims, ...]:
        """Of what the forward keeps."""
        return ()

    def routes(self, *integers: jax.Array) -> _Routes:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Dropless(_Experts):
    """As many rows as there are assignments, sorted by expert; those of other devices come last."""

    all_experts: int

    tokens = ("batch", "sequence", None)

    def routes(self, *integers: jax.Array) -> _Routes:
        chosen, numbers = integers
        (experts,) = numbers.shape
        expert = (chosen - numbers[0]).reshape(-1)
        expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
        order = jnp.argsort(expert)
        place = jnp.argsort(order)
        sizes = jnp.zeros(experts, jnp.int32).at[expert].add(1, mode="drop")
        one_in = self.all_experts // experts
        product = partial(grouped_matmul, sizes=sizes, one_in=one_in)
        return _Routes(
            to_rows=lambda values, each: values.reshape(-1, values.shape[-1])[order // each],
            to_assignments=lambda rows: rows[place].reshape(*chosen.shape, -1),
            product=product,
            transposed=lambda rows, w: product(rows, w.swapaxes(1, 2)),
            outer_product=partial(grouped_outer_product, sizes=sizes, one_in=one_in),
        )


@dataclasses.dataclass(frozen=True)
class _WithCapacity(_Experts):
    """`capacity` rows for each row of the batch and expert."""

    capacity: int

    tokens = ("batch", None, None)

    def kept_dims(self, names: Names) -> tuple[Dims, ...]:
        expert, mlp = names
        return (("batch", expert, None, mlp),) * 2

    def routes(self, *integers: jax.Array) -> _Routes:
        chosen, slots, numbers = integers
        batch, (experts,), capacity = chosen.shape[0], numbers.shape, self.capacity
        expert = chosen - numbers[0]
        has_row = (expert >= 0) & (expert < experts) & (slots < capacity)
        place = jnp.where(has_row, expert * capacity + slots, experts * capacity).reshape(batch, -1)
        assignments = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
        empty = jnp.full((batch, experts * capacity), place.shape[1])
        order = jax.vmap(lambda e, p, a: e.at[p].set(a, mode="drop"))(empty, place, assignments)
        take = jax.vmap(partial(jnp.take, axis=0, mode="fill", fill_value=0))
        return _Routes(
            to_rows=lambda values, each: take(values, order // each).reshape(batch, experts, capacity, -1),
            to_assignments=lambda rows: take(rows.reshape(batch, experts * capacity, -1), place).reshape(
                *chosen.shape, -1
            ),
            product=partial(jnp.einsum, "beci,eio->beco"),
            transposed=partial(jnp.einsum, "beco,eio->beci"),
            outer_product=partial(jnp.einsum, "beci,beco->eio"),
        )


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`_Experts.forward`, equal to others of equal experts."""

    experts: _Experts

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        return self.experts.forward(*args)


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """`_Experts.gradients` of the operands, `kept` arrays of the forward, and the gradient of its result."""

    experts: _Experts
    kept: int

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        *given, ct = args
        at = len(given) - self.kept
        return self.experts.gradients(tuple(given[:at]), tuple(given[at:]), ct)
