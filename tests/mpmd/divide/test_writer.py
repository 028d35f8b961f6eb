"""What a divided function is made of is written once."""

from __future__ import annotations

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx.mpmd.divide.writer import Writer


def test_a_number_that_is_made_of_itself_again_and_again():
    """It is computed once, not once for each way back to where it began, of which there are 2 to the 25."""

    def doubled(i):
        for _ in range(25):
            i = i + i
        return i

    jaxpr = jax.make_jaxpr(doubled)(jnp.int32(1))
    writer = Writer()
    (number,) = writer.write_jaxpr(jaxpr, [jex.Literal(jnp.int32(1), jaxpr.in_avals[0])], "")
    assert writer.known(number) == 2**25
