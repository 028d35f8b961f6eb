"""From a traced function to one flat list of equations.

In: a `Function`. Out: a `Flat`, whose nodes are equations, microbatch loops and whiles. Always: an equation
that holds computation of several tasks is inlined, or becomes one for each task; no equation reads what comes
after it. Read `calls.py` first; `scans.py`, `whiles.py` and `conds.py` say what becomes of loops and branches
over several tasks, and `writer.py` is what they write with.
"""
