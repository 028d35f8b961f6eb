"""From a function over NNX objects to what is traced of it; `mm.microbatch`.

In: the user's function, its arguments, and the shardings that are asked for. Out: a `Record` of what each
flat input and result is, and `InOutShardings`: where arguments live and results go. Always: a traced array
belongs to one Variable at most, and each group of devices is one Mesh object. Read `observe.py` first, then
`in_out_shardings.py`; the loop of `mm.microbatch` is in `microbatch_loop.py`.
"""
