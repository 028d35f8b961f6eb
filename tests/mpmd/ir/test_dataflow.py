"""What a running sum is made of."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from mmnnx.mpmd.ir.dataflow import sum_terms
from mmnnx.mpmd.ir.equations import Equation, is_var


def terms(f, dtype):
    """The numbers of arguments that are terms of a sum of float32, "made" for others."""
    x = jnp.ones(4, dtype)
    jaxpr = jax.make_jaxpr(f)(jnp.ones(4), x, x).jaxpr
    equations = [Equation(e, "") for e in jaxpr.eqns]
    maker = {v: e for e in equations for v in e.outvars}
    uses = Counter(a for e in equations for a in e.invars if is_var(a))
    found, _ = sum_terms(equations[-1], jaxpr.invars[0], maker, uses)
    return sorted(jaxpr.invars.index(v) if v in jaxpr.invars else "made" for v in found)


def test_what_widens_a_sum_widens_its_terms():
    assert terms(lambda total, x, y: total + (x + y).astype(jnp.float32), jnp.bfloat16) == [1, 2]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_a_sum_that_is_rounded_is_one_term(dtype):
    """Its terms, rounded one by one, would not add up to the same."""
    rounded = lambda total, x, y: total + (x + y).astype(dtype).astype(jnp.float32)
    assert terms(rounded, jnp.float32) == ["made"]
