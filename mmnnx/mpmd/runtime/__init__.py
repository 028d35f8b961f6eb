"""Runtime: a program is bound to the arguments and results of its function, compiled, and run.

In: a `BoundProgram`. Out: a function from flat arguments to flat results. Always: it starts calls and copies
in one order, the same in all processes, and waits for no device, except for the condition of a while, to
measure, or where CPU collectives need an order. Read `prepare.py` first, then `dispatch.py`.
"""
