"""One fragment, lowered for XLA with its shardings and donated inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.compile.donation import Donations
from mmnnx.mpmd.distributed.processes import is_described, span_processes
from mmnnx.mpmd.ir.equality import jaxpr_key
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered fragment.

    Attributes:
      stage: what compiles it.
      inputs, outputs: which input (result) of the fragment comes where.
      key: equal for fragments that are one program but for the devices that they run on.
      is_shareable: whether there may be such; not with callbacks, which belong to one executable.
    """

    stage: jax.stages.Lowered
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    key: Any
    is_shareable: bool


def lower(
    f: Fragment,
    shardings: Sequence[NamedSharding],
    fixed: Mapping[PlacedVar, NamedSharding],
    donations: Donations,
) -> Lowered:
    """Lowers a fragment.

    Args:
      f: the fragment.
      shardings: of its inputs.
      fixed: shardings that are decided, of results among others; XLA decides the rest.
      donations: the inputs that are donated, and to which results.
    """
    results = [fixed.get((v, f.mesh)) for v in f.outvars]
    if not shardings:  # nothing else tells XLA which devices to run on
        results = [s or NamedSharding(f.mesh, PartitionSpec()) for s in results]
    inputs, outputs = _donated_first(f, donations)
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
        donate_argnums=tuple(range(len(donations))),
        keep_unused=True,
    )
    types = [(f.invars[n].aval, shardings[n]) for n in inputs]
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type) for a, s in types]
    with _own_mesh(f.mesh):
        stage = jitted.trace(*args).lower()
    text = stage.as_text(debug_info=False).replace(f"@jit_{call.__name__} ", "@program ", 1)
    specs = tuple(s and s.spec for s in (*shardings, *results))
    # The text tells neither a weak type from another, nor a random key from its words.
    avals = tuple((a.shape, a.dtype, a.weak_type) for a in (v.aval for v in (*f.invars, *f.outvars)))
    is_shareable = "callback" not in text
    digest = hashlib.sha256(text.encode()).digest()
    key = (digest, inputs, outputs, specs, avals, _mesh_key(f.mesh)) if is_shareable else object()
    return Lowered(stage, inputs, outputs, key, is_shareable)


def _own_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Inside it the mesh of a fragment is in the place of that of `jax.set_mesh`, if there is one."""
    around = jax.sharding.get_abstract_mesh()
    return contextlib.nullcontext() if around.empty else jax.set_mesh(mesh)


def lowering_key(
    f: Fragment,
    shardings: Sequence[NamedSharding],
    fixed: Mapping[PlacedVar, NamedSharding],
    donations: Donations,
) -> Any:
    """A key that is equal only for what `lower` makes the same of; None if there is none.

    It is faster: without it, all iterations of an unrolled loop would be lowered to be found equal.
    """
    results = [fixed.get((v, f.mesh)) for v in f.outvars]
    specs = tuple(s and s.spec for s in (*shardings, *results))
    try:
        return jaxpr_key(f.jaxpr), specs, tuple(donations), _mesh_key(f.mesh)
    except TypeError:
        return None


def _mesh_key(mesh: Mesh) -> Any:
    """What an executable depends on of its mesh."""
    first = mesh.devices.flat[0]
    is_one_of_many = loads_on_other_meshes(mesh) or is_described(first)
    return (mesh.axis_names, mesh.devices.shape, first.device_kind) if is_one_of_many else mesh


def _donated_first(f: Fragment, donations: Donations) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Inputs and results with donations in front: JAX pairs donated inputs with results in their order."""
    first, second = ({pair[k]: None for pair in donations} for k in (0, 1))
    inputs = (*first, *(n for n in range(len(f.invars)) if n not in first))
    return inputs, (*second, *(n for n in range(len(f.outvars)) if n not in second))


def loads_on_other_meshes(mesh: Mesh) -> bool:
    """Whether what is compiled for a mesh can be loaded for another: on CPU devices of this process, where
    that is known to work."""
    return mesh.devices.flat[0].platform == "cpu" and not span_processes(mesh)
