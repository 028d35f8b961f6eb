"""`mm.jit`: an `nnx.jit` whose inner `jax.jit` is replaced.

In: the user's function and the arguments of a call. Out: results, with the state of the arguments updated.
Always: a call does what `nnx.jit` would do, and equal arguments and surroundings run the same program. Read
`jit.py` first, then `inner_jit.py`, which has a function traced and split and runs it; `fast_path.py` is for
calls like an earlier one.
"""
