"""From a function over NNX objects to what is traced of it; `mm.microbatch`.

In: the user's function, its arguments, in_shardings and out_shardings. Out: a `Function`: the jaxpr, a
`Record` of what each flat input and result is, and `InOutShardings`, where they live. Always: a traced array
belongs to one Variable at most, and each group of devices is one Mesh object. Read `observe.py` first, then
`function.py`; the loop of `mm.microbatch` is in `microbatch_loop.py`.
"""
