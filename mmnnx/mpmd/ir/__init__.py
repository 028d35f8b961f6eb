"""What the stages hand on: data, with its checks, its simulation and its printing.

`equations` (one flat list, with microbatch loops) and `origin` (what each value is made of) come first; then
`placement` (where each equation runs), `fragments` and `timetable` (SPMD programs of one mesh, phase and
position each, and the order of a loop), at last `program` (instructions over numbered buffers) and
`timeline`.
Always: an object here imports nothing of a stage. Read `equations` first, then `program`.
"""
