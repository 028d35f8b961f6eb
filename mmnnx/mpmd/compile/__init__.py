"""Compile: a `Program` becomes XLA executables.

In comes a program, with the shardings that are decided. Out go an executable for each fragment of this
process, and a sharding for each buffer. Programs are first rewritten so that XLA compiles less (`rewrites`);
then fragments that are equal but for their devices are compiled once. What a program computes never changes.
Read `compile_program` first; `donation` says who decides that a buffer is donated.
"""
