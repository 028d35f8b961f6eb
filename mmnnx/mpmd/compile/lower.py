"""One fragment, lowered for XLA: its shardings, and the inputs whose buffers its results take over."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.compile.donation import Pairs
from mmnnx.mpmd.compile.equality import computation
from mmnnx.mpmd.distributed.processes import span_processes
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered fragment.

    Attributes:
      stage: what compiles it.
      inputs, outputs: which input (result) of the fragment comes where.
      key: equal for fragments that are one program but for the devices that they run on.
      is_shared: whether there may be such; not for what calls back, as a callback belongs to one executable.
    """

    stage: jax.stages.Lowered
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    key: Any
    is_shared: bool


def lower(
    f: Fragment, shardings: Sequence[NamedSharding], fixed: Mapping[PlacedVar, NamedSharding], pairs: Pairs
) -> Lowered:
    """Lowers a fragment.

    Args:
      f: the fragment.
      shardings: of its inputs.
      fixed: shardings that are decided, of results among others; XLA decides the rest.
      pairs: the inputs that are donated, and to which results.
    """
    results = [fixed.get((v, f.mesh)) for v in f.outvars]
    if not shardings:  # nothing else tells XLA which devices to run on
        results = [s or NamedSharding(f.mesh, PartitionSpec()) for s in results]
    inputs, outputs = _orders(f, pairs)
    places = [place for _, place in sorted(zip(inputs, range(len(inputs))))]
    compute = jex.jaxpr_as_fun(f.jaxpr)

    def call(*args):
        made = compute(*(args[n] for n in places))
        return [made[n] for n in outputs]

    call.__name__ = "".join(c if c.isalnum() else "_" for c in f.name)
    jitted = jax.jit(
        call,
        in_shardings=tuple(shardings[n] for n in inputs),
        out_shardings=[results[n] for n in outputs],
        donate_argnums=tuple(range(len(pairs))),
        keep_unused=True,
    )
    types = [(f.invars[n].aval, shardings[n]) for n in inputs]
    stage = jitted.trace(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type) for a, s in types)
    ).lower()
    text = stage.as_text(debug_info=False).replace(f"@jit_{call.__name__} ", "@program ", 1)
    specs = tuple(s and s.spec for s in (*shardings, *results))
    # The text tells neither a weak type from another, nor a random key from its words.
    avals = tuple((a.shape, a.dtype, a.weak_type) for a in (v.aval for v in (*f.invars, *f.outvars)))
    is_shared = "callback" not in text
    digest = hashlib.sha256(text.encode()).digest()
    key = (digest, inputs, outputs, specs, avals, _place(f.mesh)) if is_shared else object()
    return Lowered(stage, inputs, outputs, key, is_shared)


def likeness(
    f: Fragment, shardings: Sequence[NamedSharding], fixed: Mapping[PlacedVar, NamedSharding], pairs: Pairs
) -> Any:
    """A key that is equal only for what `lower` makes the same of, and faster; None if there is none.

    Without it, the iterations of a loop that is unrolled would all be lowered to be found equal.
    """
    results = [fixed.get((v, f.mesh)) for v in f.outvars]
    specs = tuple(s and s.spec for s in (*shardings, *results))
    try:
        return computation(f.jaxpr), specs, tuple(pairs), _place(f.mesh)
    except TypeError:
        return None


def _place(mesh: Mesh) -> Any:
    """What a program depends on of its mesh."""
    return (mesh.axis_names, mesh.devices.shape) if can_be_moved(mesh) else mesh


def _orders(f: Fragment, pairs: Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Inputs and results with the pairs in front, in step: JAX pairs donated inputs with results in order."""
    first, second = ({pair[k]: None for pair in pairs} for k in (0, 1))
    inputs = (*first, *(n for n in range(len(f.invars)) if n not in first))
    return inputs, (*second, *(n for n in range(len(f.outvars)) if n not in second))


def can_be_moved(mesh: Mesh) -> bool:
    """Whether a program for a mesh can be loaded for another: on CPU devices of this process, where that is
    known to work. What comes out of JAX's persistent cache cannot; there each has an entry of its own.
    """
    platform, cached = mesh.devices.flat[0].platform, jax.config.values["jax_compilation_cache_dir"]
    return platform == "cpu" and not span_processes(mesh) and cached is None
