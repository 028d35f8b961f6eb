"""`MeshWrapper`: a mesh of JAX as a MultiMesh."""

from __future__ import annotations

from jax.sharding import Mesh

from mmnnx import MultiMesh


class MeshWrapper(MultiMesh):
    """`MultiMesh(global_mesh=mesh)`, with the mesh by position.

    Example:
      >>> with MeshWrapper(jax.make_mesh((2, 4), ("stage", "model"))) as mesh:
      ...     step, init, batch = parallelize(step, init_params, get_batch)
    """

    def __init__(self, mesh: Mesh):
        super().__init__(global_mesh=mesh)
