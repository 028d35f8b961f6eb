"""Arguments on the way into a program: what is done to each so that it is where it is read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from mmnnx.mpmd.distributed.processes import absent_array, is_here
from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.shardings import entering, is_committed
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.put import own_copy, put
from mmnnx.mpmd.runtime.transfers import spread

Bind = Callable[[Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class InputBindings:
    """How the inputs of a program come about.

    Attributes:
      sources: for each input the number of a value, of arguments, constants and placed constants in a row;
        and what is done to it, if anything.
      placed_constants: each makes one such value of a constant, once, ahead of the first call.
      overwritable: the buffers of inputs whose arrays may be overwritten.
    """

    sources: list[tuple[int, Bind | None]]
    placed_constants: list[Callable[[], Any]]
    overwritable: set[int]


def bind_inputs(bound: BoundProgram, leaves: Sequence[Any], constants: Sequence[Any]) -> InputBindings:
    """How the inputs of a program come about from arguments like `leaves` and from constants.

    The shardings of the inputs are added to `bound.fixed`.
    """
    number, inputs, donated = bound.number, bound.program.inputs, bound.donated
    values = [*leaves, *constants]
    sources: list[tuple[int, Bind | None]] = []
    placed_constants: list[Callable[[], Any]] = []
    overwritable: set[int] = set()
    returned = {*filter(is_var, bound.flat.outvars)}
    meshes: dict[Var, list[Mesh]] = {}
    for v, mesh in inputs.values():
        meshes.setdefault(v, []).append(mesh)
    for buffer, (v, mesh) in inputs.items():
        n = number[v]
        own = bound.in_shardings[n] if n < len(leaves) else None
        here = own if own is not None and own.mesh == mesh else entering(v.aval, mesh, own)
        target = bound.fixed.setdefault((v, mesh), here)
        later = bound.next_shardings.get(n)
        bind = binder(values[n], target) if later is None else _counter_binder(values[n], later, target)
        if n >= len(leaves):
            sources.append((len(values) + len(placed_constants), None))
            placed_constants.append(functools.partial(place_constant, values[n], bind))
            continue
        sources.append((n, bind))
        # Where it is used on a mesh with some of the same devices, that has its buffers there.
        alone = not any({*mesh.devices.flat} & {*m.devices.flat} for m in meshes[v] if m != mesh)
        # An abstract argument stands for one that is there already, as the state of a later step is.
        is_there = bind is None or (here is own and isinstance(values[n], jax.ShapeDtypeStruct))
        if donated[n] and is_there and alone and v not in returned:
            overwritable.add(buffer)
    return InputBindings(sources, placed_constants, overwritable)


def binder(x: Any, target: NamedSharding) -> Bind | None:
    """How arguments that live where `x` does become arrays of the target sharding; None if they are."""
    return _binder(jax.typeof(x), x.sharding if is_committed(x) else None, target)


def _counter_binder(x: Any, later: NamedSharding, target: NamedSharding) -> Bind:
    """The same for one that is unplaced, and after a call lives where `later` says."""
    binds = {False: binder(x, target), True: _binder(jax.typeof(x), later, target)}

    def bind(x: Any) -> jax.Array:
        found = binds[is_committed(x)]
        return x if found is None else found(x)

    return bind


def _binder(aval: Any, own: Sharding | None, target: NamedSharding) -> Bind | None:
    """A value replicated over more devices than the target's is there already: its shards are used as they
    are."""
    if own is not None and own.is_equivalent_to(target, aval.ndim):
        return None
    replicated = own is not None and own.is_fully_replicated and target.is_fully_replicated
    is_there = own is not None and replicated and own.device_set > target.device_set
    if (own is None or is_there) and not is_here(target):
        absent = absent_array(aval.shape, aval.dtype, target)
        return lambda x: absent
    if is_there:
        return lambda x: spread(x, target)
    return lambda x: put(x, target)


def place_constant(x: Any, bind: Bind | None) -> Any:
    """A constant where it is read, in no buffer that somebody else may give away."""
    here = x if bind is None else bind(x)
    return own_copy(here) if isinstance(x, jax.Array) else here
