"""How a function over NNX objects becomes programs on several TaskMeshes: one file for each step."""
