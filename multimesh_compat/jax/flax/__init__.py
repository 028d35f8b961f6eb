"""`multimesh.jax.flax`: tasks made of linen modules."""
