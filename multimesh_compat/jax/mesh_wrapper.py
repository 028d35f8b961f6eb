"""`MeshWrapper`: a mesh of JAX as a MultiMesh."""

from __future__ import annotations

from jax.sharding import Mesh

from mmnnx import MultiMesh


class MeshWrapper(MultiMesh):
    """`MultiMesh(global_mesh=mesh)`, with the mesh by position.

    Example:
      >>> with MeshWrapper(jax.make_mesh((2, 4), ("stage", "model"))):
      ...     f = task(lambda w, x: w * x, mesh_slice={"stage": 1})
      ...     step, init, data = parallelize(f, lambda: jnp.ones(4), lambda: jnp.ones(4))
    """

    def __init__(self, mesh: Mesh):
        super().__init__(global_mesh=mesh)
