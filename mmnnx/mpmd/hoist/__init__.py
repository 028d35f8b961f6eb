"""What leaves the microbatch loop, to be done once for all microbatches.

In: placed nodes. Out: the same, with what is new placed as well. Reductions of gradients over a data axis go
behind the loop (`reductions.py`), gathers of weights that are sharded over it go ahead (`gathers.py`).
Always: results are equal up to the order of a sum; what `sharding_propagation.py` finds out decides about
speed alone. Read `hoist.py` first, then `reductions.py`.
"""
