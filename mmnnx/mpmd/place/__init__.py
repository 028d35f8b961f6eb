"""Every equation gets a mesh: from task scopes, from the homes of state, then by minimum cuts.

In: a function as one flat list of equations, and where its arguments live. Out: its nodes, each with a
TaskMesh, a phase, a position in the flow of activations, and the reason (`ir.placement`); sums of gradients
that are made on several meshes have an accumulator on each.
Always: an equation in a task scope is on the mesh of the task; one that depends on no placed state has no
place, and is done wherever it is read. Read `place.py` first; `backward.py` and `boundaries.py` (the minimum
cut) say why an equation is on a mesh.
"""
