"""Compile: a `Program` becomes XLA executables.

In: a program, and the shardings that are decided. Out: an executable for each fragment of this process, and a
sharding for each buffer. On the way the program is rewritten so that XLA compiles less (`rewrites.py`), and
fragments that are equal but for their devices are compiled once. Always: what a program computes stays as it
is. Read `compile_program.py` first; `donation.py` says who decides that a buffer is donated.
"""
