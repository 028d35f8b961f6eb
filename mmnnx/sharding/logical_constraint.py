"""The primitive for a constraint in logical axis names whose task is not known yet.

Outside of a task a name may mean another mesh axis in each task that reads the value. `mm.jit` finds those
tasks when it has the whole function (`mpmd/inline/logical_constraints.py`) and puts constraints over their
meshes in its place. Where JAX compiles the function alone, it is one over the MultiMesh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

logical_constraint_p = jex.Primitive("logical_constraint")


def logical_constraint(x: Any, names: tuple[Any, ...], default: NamedSharding | None) -> Any:
    """`x`, to be sharded by the names of its dimensions in the tasks that read it.

    Args:
      x: an array.
      names: one entry for each dimension, as in `to_spec`; what more there are no mesh axis is for.
      default: its sharding where no task reads or makes it; None for no constraint.
    """
    return logical_constraint_p.bind(x, names=names, default=default)


def _constrain(x: Any, *, names: tuple[Any, ...], default: NamedSharding | None) -> Any:
    return x if default is None else jax.lax.with_sharding_constraint(x, default)


def _batch(args: Any, dims: Any, *, names: tuple[Any, ...], default: NamedSharding | None) -> Any:
    (x,), (dim,) = args, dims
    free = PartitionSpec.UNCONSTRAINED
    if default is not None:
        spec = [*default.spec, *[None] * (x.ndim - 1 - len(default.spec))]
        default = NamedSharding(default.mesh, PartitionSpec(*spec[:dim], free, *spec[dim:]))
    names = (*names[:dim], free, *names[dim:])
    return logical_constraint_p.bind(x, names=names, default=default), dim


logical_constraint_p.def_impl(_constrain)
logical_constraint_p.def_abstract_eval(lambda x, **params: x)
ad.deflinear2(logical_constraint_p, lambda ct, _, **params: [logical_constraint_p.bind(ct, **params)])
batching.primitive_batchers[logical_constraint_p] = _batch
mlir.register_lowering(logical_constraint_p, mlir.lower_fun(_constrain, multiple_results=False))
