"""Runtime: a program is compiled, bound to the arguments and results of its function, and run.

In comes a `BoundProgram`. Out goes a function from flat arguments to flat results that a call of the user's
function runs. To run it starts calls and copies in one order, the same in all processes, and waits for no
device, except to measure, or where CPU collectives need an order. Read `prepare` first, then `dispatch`.
"""
