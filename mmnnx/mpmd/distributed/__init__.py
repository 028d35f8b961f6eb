"""Distributed: several processes that run the same Python, on top of `jax.distributed`.

In come the address of a coordinator and the number of this process. Out go arrays and small messages between
processes, and which process has which devices. Nobody waits for ever: where one process fails, or waits too
long, all end with a message that says which and where. Read `initialize` first, then `processes`.
"""
