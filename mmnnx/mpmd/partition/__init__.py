"""Placed equations become fragments: SPMD programs of one mesh, phase and position each; and stages of loops.

In: placed nodes. Out: a `Partition`: the plan (fragments and loops in order), what holds each result, and the
shardings that are decided. On the way each backward repeats what is cheaper to compute again than to keep
(`rematerialise.py`), and under zero-bubble schedules is split in two (`split_backward.py`).
Always: a fragment is on one mesh; each comes after those that it needs. Read `partition.py` first, then
`fragments.py` and `grouping.py`.
"""
