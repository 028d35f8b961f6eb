"""What equations are in a training step, told from their scopes and what they read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmnnx.mpmd.ir.equations import Equation
from mmnnx.mpmd.place.classify import Role, classify


def test_a_forward_that_is_computed_again_of_arguments_is_a_forward():
    """`jax.checkpoint` repeats it inside of the backward; what depends on a gradient is of the backward."""

    def step(x):
        loss = jnp.sin(x)
        again = jnp.exp(x)
        gradient = jnp.negative(loss)
        return again * gradient

    repeated = "transpose(jvp(checkpoint))/rematted_computation"
    scopes = ["jvp(checkpoint)", repeated, "transpose(jvp(checkpoint))", repeated]
    jaxpr = jax.make_jaxpr(step)(1.0).jaxpr
    equations = [Equation(e, scope) for e, scope in zip(jaxpr.eqns, scopes, strict=True)]
    roles = classify(equations, {v: [e for e in equations if v in e.invars] for v in jaxpr.invars})
    assert [roles.of[e] for e in equations] == [Role.FORWARD, Role.FORWARD, Role.BACKWARD, Role.BACKWARD]
