"""Emit: a plan becomes a `Program`.

In comes a `Plan`: fragments and microbatch loops, each after what it needs. Out goes a `Program`: fragment
calls and transfers in the order of dispatch, over numbered buffers. Every buffer is filled once, before it is
read, on the mesh where it is read, and dropped after its last use. Read `emit` first, then `build`; `merge`
makes one call of several that always follow each other.
"""
