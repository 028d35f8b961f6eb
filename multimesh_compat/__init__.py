"""The documented API of NVIDIA's MultiMesh for JAX, on top of mmnnx and stock JAX.

What comes in: programs that import `multimesh.jax`. What goes out: the same names, made of mmnnx's.
What always holds: mmnnx imports nothing from here; `install` replaces nothing that is installed.
Read first: `install.py` (the import), then `jax/tasks.py` and `jax/parallel.py`; docs/multimesh.md says what
is equal and what differs.
"""

from multimesh_compat.install import install

__all__ = ["install"]
