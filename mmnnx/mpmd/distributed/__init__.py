"""Distributed: several processes that run the same Python, on top of `jax.distributed`.

In: the address of a coordinator, and the number of this process. Out: arrays and small messages between
processes, and which process has which devices. Always: nobody waits for ever; where one process fails, or
waits too long, all end with a message that says which and where. Read `initialize.py` first, then
`processes.py`.
"""
