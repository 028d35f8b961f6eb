"""What the experts of a mixture do: each takes the tokens that were sent to it, and no others."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmnnx.modules.grouped_matmul import grouped_matmul, grouped_outer_product
from mmnnx.sharding.logical_shard_map import Axes, Dims, Layout, logical_shard_map

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
    axes. The backward reads the hidden features that the forward computed, or computes them again where the
    experts are divided: as all tokens may come to one device, each would need room for all.

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

    What divides a sequence divides these tokens: the devices need all of it, and each computes with some.
    The backward reads the hidden features that the forward computed.

    Args:
      slots: int32 [batch, sequence, top_k], the place of a token among those of its expert, from 0. From
        `capacity` on it gets nothing.
      capacity: tokens of a row that an expert takes.
      x, weights, chosen, gate, up, down, activation, names: as in `dropless`.
    """
    numbers, places = jnp.arange(gate.shape[0]), jnp.arange(capacity)
    experts = _WithCapacity(activation)
    return _weighted_sums(experts, names, (x, weights, chosen, slots, numbers, places, gate, up, down))


# -------------------------------------------------------------------------------- over the devices of a task


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted_sums(experts: _Experts, names: Names, args: tuple[jax.Array, ...]) -> jax.Array:
    operands, _ = experts.dims(names)
    return logical_shard_map(experts, _layout(names, operands, operands[:1]), *args)[0]


def _forward(experts: _Experts, names: Names, args: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    operands, hidden = experts.dims(names)
    results = (operands[0], hidden, hidden)
    y, gated, upped = logical_shard_map(_Forward(experts, names), _layout(names, operands, results), *args)
    return y, (*args, gated, upped)


def _backward(experts: _Experts, names: Names, saved: tuple[jax.Array, ...], ct: jax.Array) -> tuple[Any]:
    operands, hidden = experts.dims(names)
    given = *operands, hidden, hidden, operands[0]
    if experts.keeps(divided=True):  # those of the kernels can wait, as a zero-bubble schedule has them
        layout = _layout(names, given, (*operands[:2], hidden, hidden))
        x, weights, *of_kept = logical_shard_map(_OfTokens(experts, len(operands)), layout, *saved, ct)
        layout = _layout(names, (*operands[:-3], *given[-3:], hidden, hidden), operands[-3:])
        args = *saved[: len(operands) - 3], *saved[-2:], ct, *of_kept
        kernels: Sequence[jax.Array] = logical_shard_map(_OfKernels(experts), layout, *args)
    else:
        layout = _layout(names, given, (*operands[:2], *operands[-3:]))
        of_all = _Gradients(experts, names, len(operands))
        x, weights, *kernels = logical_shard_map(of_all, layout, *saved, ct)
    return ((x, weights, *[None] * (len(operands) - 5), *kernels),)


_weighted_sums.defvjp(_forward, _backward)


def _layout(names: Names, operands: tuple[Dims, ...], results: tuple[Dims, ...]) -> Layout:
    names_of_all = (*filter(None, names), "sequence", "batch")
    return Layout(names_of_all, operands, results, free=("batch", "sequence"))


# --------------------------------------------------------------------------------------------- on one device


class _Routes(NamedTuple):
    """Rows for the experts of a device, and their products with the matrices of these.

    Attributes:
      to_rows: from values [batch, n, features], and how many assignments share each: the value of each row,
        or zeros where a row has no assignment.
      to_assignments: rows as [batch, sequence, top_k, features]; zeros for experts of other devices.
      to_kept: rows in a shape whose dimensions have the names of `_Experts.dims`.
      product: of rows [..., in] with [experts, in, out].
      transposed: of rows [..., out] with the same, transposed.
      outer_product: of rows [..., in] with rows [..., out]: [experts, in, out].
    """

    to_rows: Callable[[jax.Array, int], jax.Array]
    to_assignments: Callable[[jax.Array], jax.Array]
    to_kept: Callable[[jax.Array], jax.Array]
    product: Callable[[jax.Array, jax.Array], jax.Array]
    transposed: Callable[[jax.Array, jax.Array], jax.Array]
    outer_product: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Experts(abc.ABC):
    """Some of all experts: those with the numbers that are given, which follow each other.

    Operands are x, weights, integers of each assignment, the numbers, and the three kernels.
    """

    activation: Activation

    def __call__(self, *args: jax.Array) -> tuple[jax.Array]:
        return (self.forward(*args)[0],)

    def forward(self, x: jax.Array, weights: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        """The weighted sums; and what the backward may read, the products with `gate` and `up`."""
        *integers, gate, up, down = others
        routes = self.routes(*integers)
        rows = routes.to_rows(x, weights.shape[-1])
        gated, upped = routes.product(rows, gate), routes.product(rows, up)
        made = routes.to_assignments(routes.product(self.activation(gated, upped), down))
        weights = weights.astype(made.dtype)
        y = jnp.einsum("bskd,bsk->bsd", made, weights, preferred_element_type=jnp.float32)
        return y.astype(made.dtype), routes.to_kept(gated), routes.to_kept(upped)

    def gradients(
        self, args: Sequence[jax.Array], kept: Sequence[jax.Array] | None, ct: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Those of x, weights and the kernels; by what the forward kept, if it did."""
        x, weights, *integers = args[:-3]
        routes = self.routes(*integers)
        if kept is None:
            rows = routes.to_rows(x, weights.shape[-1])
            kept = [routes.to_kept(routes.product(rows, w)) for w in args[-3:-1]]
        *of_tokens, gated, upped = self.gradients_of_tokens(routes, args, kept, ct)
        return *of_tokens, *self.gradients_of_kernels(routes, x, weights, kept, (gated, upped), ct)

    def gradients_of_tokens(
        self, routes: _Routes, args: Sequence[jax.Array], kept: Sequence[jax.Array], ct: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Those of x and weights, and of what the forward kept."""
        _, weights, *_, gate, up, down = args
        cts, of_row = self._of_rows(routes, weights, ct)
        hidden, to_products = jax.vjp(self.activation, *_as_rows(kept, cts))
        # A row makes weight x hidden x down. So the gradient of its weight needs no product with `down`.
        back = routes.transposed(cts, down)
        exact = jnp.promote_types(hidden.dtype, jnp.float32)
        of_weights = jnp.einsum("...m,...m->...", hidden, back, preferred_element_type=exact)[..., None]
        gated, upped = to_products((back * of_row).astype(hidden.dtype))
        of_rows = routes.transposed(gated, gate) + routes.transposed(upped, up)
        return (
            routes.to_assignments(of_rows).sum(2),
            routes.to_assignments(of_weights)[..., 0].astype(weights.dtype),
            routes.to_kept(gated),
            routes.to_kept(upped),
        )

    def gradients_of_kernels(
        self,
        routes: _Routes,
        x: jax.Array,
        weights: jax.Array,
        kept: Sequence[jax.Array],
        of_kept: Sequence[jax.Array],
        ct: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Those of the kernels; by what was kept, and the gradients of it."""
        rows = routes.to_rows(x, weights.shape[-1])
        cts, of_row = self._of_rows(routes, weights, ct)
        gated, upped = _as_rows(of_kept, cts)
        hidden = self.activation(*_as_rows(kept, cts))
        return (
            routes.outer_product(rows, gated),
            routes.outer_product(rows, upped),
            routes.outer_product(hidden, (cts * of_row).astype(cts.dtype)),
        )

    def _of_rows(self, routes: _Routes, weights: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradient of the sums that each row went into, and its weight there."""
        of_row = routes.to_rows(weights.reshape(weights.shape[0], -1, 1), 1)
        return routes.to_rows(ct, weights.shape[-1]), of_row

    @abc.abstractmethod
    def dims(self, names: Names) -> tuple[tuple[Dims, ...], Dims]:
        """The names of the dimensions of the operands, and of what is kept."""

    @abc.abstractmethod
    def keeps(self, divided: bool) -> bool:
        """Whether the forward keeps hidden features for the backward, if experts are divided over devices."""

    @abc.abstractmethod
    def routes(self, *integers: jax.Array) -> _Routes:
        """Which rows there are, by the integers of the assignments and the numbers of the experts."""


def _as_rows(kept: Sequence[jax.Array], rows: jax.Array) -> list[jax.Array]:
    """What was kept, in the shape of rows again."""
    return [values.reshape(*rows.shape[:-1], -1) for values in kept]


@dataclasses.dataclass(frozen=True)
class _Dropless(_Experts):
    """As many rows as there are assignments, sorted by expert; those of other devices come last."""

    all_experts: int

    def dims(self, names: Names) -> tuple[tuple[Dims, ...], Dims]:
        expert, mlp = names
        tokens, into = ("batch", "sequence", None), (expert, None, mlp)
        return (*[tokens] * 3, (expert,), into, into, (expert, mlp, None)), (*tokens, mlp)

    def keeps(self, divided: bool) -> bool:
        return not divided

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
            to_kept=lambda rows: rows.reshape(*chosen.shape, -1),
            product=product,
            transposed=partial(product, transposed=True),
            outer_product=partial(grouped_outer_product, sizes=sizes, one_in=one_in),
        )


@dataclasses.dataclass(frozen=True)
class _WithCapacity(_Experts):
    """`capacity` rows for each row of the batch and expert, or those of them with the numbers in `places`."""

    def dims(self, names: Names) -> tuple[tuple[Dims, ...], Dims]:
        expert, mlp = names
        tokens, into = ("batch", None, None), (expert, None, mlp)
        operands = *[tokens] * 4, (expert,), ("sequence",), into, into, (expert, mlp, None)
        return operands, ("batch", expert, "sequence", mlp)

    def keeps(self, divided: bool) -> bool:
        return True

    def routes(self, *integers: jax.Array) -> _Routes:
        chosen, slots, numbers, places = integers
        batch, (experts,), (capacity,) = chosen.shape[0], numbers.shape, places.shape
        expert, slot = chosen - numbers[0], slots - places[0]
        has_row = (expert >= 0) & (expert < experts) & (slot >= 0) & (slot < capacity)
        place = jnp.where(has_row, expert * capacity + slot, experts * capacity).reshape(batch, -1)
        assignments = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
        empty = jnp.full((batch, experts * capacity), place.shape[1])
        order = jax.vmap(lambda e, p, a: e.at[p].set(a, mode="drop"))(empty, place, assignments)
        take = jax.vmap(partial(jnp.take, axis=0, mode="fill", fill_value=0))
        return _Routes(
            to_rows=lambda values, each: take(values, order // each).reshape(batch, experts, capacity, -1),
            to_assignments=lambda rows: take(rows.reshape(batch, experts * capacity, -1), place).reshape(
                *chosen.shape, -1
            ),
            to_kept=lambda rows: rows,
            product=partial(jnp.einsum, "beci,eio->beco"),
            transposed=partial(jnp.einsum, "beco,eio->beci"),
            outer_product=partial(jnp.einsum, "beci,beco->eio"),
        )


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`_Experts.forward`, over a mesh."""

    experts: _Experts
    names: Names
    unmade: tuple[int, ...] = ()

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        return self.experts.forward(*args)

    def over(self, axes: Axes) -> _Forward:
        keeps = self.experts.keeps(bool(axes.get(self.names[0] or "")))
        return dataclasses.replace(self, unmade=() if keeps else (1, 2))


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """`_Experts.gradients`, over a mesh: of the operands, what was kept, and the gradient of the sums."""

    experts: _Experts
    names: Names
    operands: int
    unread: tuple[int, ...] = ()

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        *given, ct = args
        kept = None if self.unread else given[self.operands :]
        return self.experts.gradients(given[: self.operands], kept, ct)

    def over(self, axes: Axes) -> _Gradients:
        keeps = self.experts.keeps(bool(axes.get(self.names[0] or "")))
        return dataclasses.replace(self, unread=() if keeps else (self.operands, self.operands + 1))


@dataclasses.dataclass(frozen=True)
class _OfTokens:
    """`_Experts.gradients_of_tokens`, over a mesh; its arguments are those of `_Gradients`."""

    experts: _Experts
    operands: int

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        *given, ct = args
        own, kept = given[: self.operands], given[self.operands :]
        return self.experts.gradients_of_tokens(self.experts.routes(*own[2:-3]), own, kept, ct)


@dataclasses.dataclass(frozen=True)
class _OfKernels:
    """`_Experts.gradients_of_kernels`, over a mesh."""

    experts: _Experts

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        x, weights, *integers, gated, upped, ct, of_gated, of_upped = args
        routes, kept, of_kept = self.experts.routes(*integers), (gated, upped), (of_gated, of_upped)
        return self.experts.gradients_of_kernels(routes, x, weights, kept, of_kept, ct)
