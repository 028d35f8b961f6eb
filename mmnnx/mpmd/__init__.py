"""How a function becomes MPMD: a compiler from traced NNX functions to programs over several TaskMeshes.

Each folder is a stage, and takes what the one before it hands on: `frontend`, `divide`, `inline`, `place`,
`hoist`, `partition`, `emit`, `compile`, `runtime`. Three are libraries: `ir` has what the stages hand on,
`schedule` orders the work of a microbatch loop, `distributed` is for several processes. `jit` is `mm.jit`
itself. Imports point one way (the layers in pyproject.toml). Read `pipeline.py` first: it puts the stages
together.
"""
