"""Planning for machines that are not here: compile a step for described devices, and say what it needs.

`targets` describes machines, by the figures in `chips`; `fragments` and `memory` read what was compiled;
`planning` puts them together. Read `planning.py` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmnnx.mpmd.jit.jit import Jit
    from mmnnx.plan.planning import Plan
    from mmnnx.plan.targets import target

__all__ = ["Plan", "plan", "target"]

_HOMES = {"Plan": "mmnnx.plan.planning", "target": "mmnnx.plan.targets"}


def plan(f: Jit[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Compiles a step for its devices, which may be only described, and says what it needs of them.

    Nothing runs. Of a machine that is not here `mm.target` gives the devices; the compiler is that of the
    machine, so memory is what it will be. Times are estimates: see docs/targets.md.

    Args:
      f: made by `mm.jit`. What is on one TaskMesh and needs no program is not planned.
      *args, **kwargs: what it will be called with, or abstract: modules of `nnx.eval_shape`,
        `jax.ShapeDtypeStruct`. State that `in_shardings` places counts as being there.

    Returns:
      The plan. That a fragment does not fit is an answer, too: `Plan.overflow`.

    Raises:
      TypeError: for a function that `mm.jit` did not make.
      ValueError: as `mm.jit` does, for a function that is on one TaskMesh, and in several processes.
      RuntimeError: if the compiler refuses a fragment, for another reason than memory.

    Example:
      >>> found = plan(train_step, model, optimizer, jax.ShapeDtypeStruct((16, 9), jnp.int32))
      >>> len(found.memory), found.fits  # with mm.target, of a machine elsewhere; a CPU has no limit
      (4, None)
    """
    from mmnnx.plan.planning import make_plan  # with all of the compiler, which `import mmnnx` does not need

    return make_plan(f, *args, **kwargs)


if not TYPE_CHECKING:  # for which every name would be one of mmnnx

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'mmnnx.plan' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
