"""Emit: a plan becomes a `Program`.

In: a plan, fragments and loops, each after what it needs. Out: a `Program`, fragment calls and transfers in
the order of dispatch, over numbered buffers. Always: a buffer is filled once (a carry of a while once in each
iteration), before it is read, on the mesh where it is read, and dropped after its last use. Read `emit.py`
first, then `build.py`; `merge.py` makes one call of several that always follow each other.
"""
