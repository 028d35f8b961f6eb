"""Every equation gets a mesh: from task scopes, from the homes of state, then by minimum cuts.

In: a function as one flat list of equations, and where its arguments live. Out: the same nodes, each with a
TaskMesh, a phase and a position in the flow of activations (`ir.placement`).
Always: an equation in a task scope is on the mesh of the task; one that depends on no placed state has no
place, and is done wherever it is read. Read `place.py` first; `backward.py` and `boundaries.py` (the minimum
cut) say why an equation is on a mesh.
"""
