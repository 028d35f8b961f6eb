"""How a function becomes MPMD: a compiler from traced NNX functions to programs over several TaskMeshes.

Each folder is a stage, and takes what the one before it hands on: `frontend`, `inline`, `place`, `hoist`,
`partition`, `emit`, `compile`, `runtime`. `ir` has what they hand on; `schedule` orders the work of a
microbatch loop; `distributed` has what several processes need; `jit` is `mm.jit` itself. Imports point
towards `ir` (the layers in pyproject.toml). Read `pipeline.py` first: it is the whole way, in a dozen lines.
"""
