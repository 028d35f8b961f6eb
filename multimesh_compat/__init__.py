"""The documented API of NVIDIA's MultiMesh for JAX, on top of mmnnx and stock JAX."""

from multimesh_compat.install import install

__all__ = ["install"]
