"""Planning for machines that are not here: compile a step for described devices, and say what it needs.

`targets` describes machines, by the figures in `chips`; `fragments` and `memory` read what was compiled;
`planning` puts them together. Read `planning.py` first.
"""

from mmnnx.plan.planning import Plan, plan
from mmnnx.plan.targets import target

__all__ = ["Plan", "plan", "target"]
