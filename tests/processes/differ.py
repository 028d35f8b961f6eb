"""A function that is not the same in every process."""

import sys

import jax.numpy as jnp

import mmnnx as mm

COORDINATOR, COUNT, NUMBER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mm.initialize(COORDINATOR, COUNT, NUMBER, timeout=60)
mesh = mm.MultiMesh(axis_sizes=(COUNT,), axis_names=("stage",))
first, second = (mm.task(lambda x: x * (NUMBER + 1.0), f"t{n}", mesh_slice={"stage": n}) for n in range(2))
try:
    mm.jit(lambda x: second(first(x)), mesh=mesh)(jnp.ones(4))
except ValueError as error:
    print(f"process {NUMBER} raised: {error}", flush=True)
    raise
