"""Mixture of experts: a router sends each token to a few of many SwiGLUs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.experts import dropless, with_capacity
from mmnnx.modules.linear import KERNEL_INIT, Linear, Names
from mmnnx.modules.logical import constrain, named

EXPERT_INIT = nnx.initializers.lecun_normal(batch_axis=0)  # the experts' axis is no fan-in


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """Statistics and losses of a router over the tokens of one call: a pytree of float32 arrays.

    Attributes:
      load_balancing: scalar, the loss of the Switch Transformer (arXiv:2101.03961, eq. 4-6): experts times
        the sum over experts of `fraction` times mean router probability. 1 where the load is even.
      router_z: scalar, the z-loss of ST-MoE (arXiv:2202.08906, eq. 5): mean squared logsumexp of the logits.
      fraction: [experts], the share of all assignments (tokens x top_k) that chose each expert; sums to 1.
      dropped: scalar, the share of assignments that found their expert full.

    Example:
      >>> _, aux = MoE(16, 32, experts=4, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16)))
      >>> aux.fraction.shape, float(aux.dropped)
      ((4,), 0.0)
    """

    load_balancing: jax.Array
    router_z: jax.Array
    fraction: jax.Array
    dropped: jax.Array


class MoE(nnx.Module):
    """`top_k` of `experts` SwiGLUs for each token: [batch, sequence, width] to the same.

    The router is a linear layer in float32; its softmax over experts, normalised over the chosen ones, weighs
    their outputs. (For top_k=1 it is not normalised, as in Switch: that would leave 1, and no gradient.)

    Without `capacity_factor` no token is dropped (see `dropless`): work grows with top_k, and not with the
    number of experts.

    With it each row of the batch is a group, and an expert takes `capacity(sequence)` of its assignments: the
    first choices of all tokens in order, then the second choices, and so on. A token beyond that gets nothing
    from that expert (GShard, arXiv:2006.16668). All experts have equal work then, capacity_factor times that
    of an even share.

    Over the devices of a task the experts are divided (expert parallelism) and their hidden features, as the
    task's rules for `in_axes` say. Where experts are divided and there is no `capacity_factor`, the backward
    computes the hidden features again. Gradients by forward-mode differentiation are refused.

    The `MoEAux` is over the tokens of one call: under `mm.microbatch`, of one microbatch.

    Args:
      width: features of a token.
      mlp: hidden features of an expert.
      experts: number of experts.
      top_k: experts for each token.
      capacity_factor: slots of an expert, as a multiple of an even share. None: dropless.
      normalize: whether the weights of a token's experts add up to 1, for a top_k above 1.
      rngs, dtype, param_dtype: as in `nnx.Linear`. The router computes in float32 whatever `dtype` is.
      kernel_init: makes `gate` and `up`, [experts, width, mlp].
      out_init: makes `down`, [experts, mlp, width].
      router_init: makes the router's kernel, [width, experts].
      in_axes, out_axes, router_axes: logical axis names of these three.

    Raises:
      ValueError: top_k outside 1 to experts, a capacity_factor that is not positive, and when called an `x`
        of another shape.

    Example:
      >>> moe = MoE(8, 16, experts=4, rngs=nnx.Rngs(0))
      >>> y, aux = moe(jnp.ones((2, 3, 8)))
      >>> y.shape, aux.fraction.shape
      ((2, 3, 8), (4,))

    Subclasses may override `route` (which experts, with what weight) or `activation` (a static method).
    """

    def __init__(
        self,
        width: int,
        mlp: int,
        experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        normalize: bool = True,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = EXPERT_INIT,
        out_init: nnx.Initializer = EXPERT_INIT,
        router_init: nnx.Initializer = KERNEL_INIT,
        in_axes: Names = ("expert", "embed", "mlp"),
        out_axes: Names = ("expert", "mlp", "embed"),
        router_axes: Names = ("embed", None),
    ):
        if not 1 <= top_k <= experts:
            raise ValueError(f"MoE: top_k={top_k} of {experts} experts: use 1 to {experts}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(
                f"MoE: capacity_factor={capacity_factor} leaves no slots: use 1.25, say, or None"
            )
        self.width, self.experts, self.top_k, self.capacity_factor = width, experts, top_k, capacity_factor
        self.normalize = normalize and top_k > 1
        self.names = (in_axes[0], in_axes[2]) if in_axes else (None, None)
        self.dtype, self.param_dtype = dtype, param_dtype
        self.router = Linear(
            width,
            experts,
            use_bias=False,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=router_init,
            kernel_axes=router_axes,
            rngs=rngs,
        )
        into, out_of = named(kernel_init, *in_axes), named(out_init, *out_axes)
        self.gate = nnx.Param(into(rngs.params(), (experts, width, mlp), param_dtype))
        self.up = nnx.Param(into(rngs.params(), (experts, width, mlp), param_dtype))
        self.down = nnx.Param(out_of(rngs.params(), (experts, mlp, width), param_dtype))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEAux]:
        """The experts' weighted outputs, of the shape of `x`, and the `MoEAux` of the router."""
        if x.ndim != 3 or x.shape[-1] != self.width or not x.size:
            raise ValueError(
                f"MoE: x is [batch, sequence, {self.width}] with at least one token, not {list(x.shape)}"
            )
        logits = self.router(x)
        probabilities = jax.nn.softmax(logits)
        weights, chosen = self.route(probabilities)
        assigned = jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32)
        fraction = assigned.mean((0, 1, 2), dtype=jnp.float32)
        dtype = self.dtype or jnp.result_type(x.dtype, self.param_dtype)
        x, *kernels = (v.astype(dtype) for v in (x, self.gate[...], self.up[...], self.down[...]))
        options: dict[str, Any] = dict(activation=self.activation, names=self.names)
        if self.capacity_factor is None:
            y, dropped = dropless(x, weights, chosen, *kernels, **options), jnp.zeros(())
        else:
            slots, capacity = self._slots(assigned), self.capacity(x.shape[1])
            y = with_capacity(x, weights, chosen, slots, *kernels, capacity=capacity, **options)
            dropped = (slots >= capacity).mean(dtype=jnp.float32)
        return constrain(y, "batch", "sequence", "embed"), MoEAux(
            load_balancing=self.experts * jnp.sum(fraction * probabilities.mean((0, 1))),
            router_z=jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2),
            fraction=fraction,
            dropped=dropped,
        )

    def route(self, probabilities: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which experts each token goes to, and how they count.

        Args:
          probabilities: of the router, float32 [batch, sequence, experts].

        Returns:
          (weights, numbers of experts), float32 and int32 [batch, sequence, top_k], most preferred first.
        """
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        return weights / weights.sum(-1, keepdims=True) if self.normalize else weights, chosen

    @staticmethod
    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden features of an expert, elementwise from the products with `gate` and `up`."""
        return jax.nn.silu(gate) * up

    def capacity(self, tokens: int) -> int:
        """How many of the assignments of a group of `tokens` an expert takes."""
        assert self.capacity_factor is not None
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def _slots(self, assigned: jax.Array) -> jax.Array:
        """The slot of each assignment in its expert, counted from 0: int32 [batch, sequence, top_k]."""
        by_choice = assigned.swapaxes(1, 2)
        flat = by_choice.reshape(assigned.shape[0], -1, self.experts)
        before = (jnp.cumsum(flat, axis=1) - flat).reshape(by_choice.shape).swapaxes(1, 2)
        return jnp.sum(before * assigned, axis=-1)
