"""Explicit axes: shardings in the types of a traced function become constraints.

On a mesh with Explicit axes (`jax.make_mesh`) JAX keeps the sharding of every value in its type. All later
stages know Auto axes alone. What types ask for is kept: where a value is resharded, and of results.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Atom, Var, is_var
from mmnnx.mpmd.ir.rewrite import read, trace_equations
from mmnnx.mpmd.ir.shardings import explicit_mesh
from mmnnx.sharding.mesh import auto_mesh

_RESHARD = {"reshard", "mesh_cast"}

# Parameters that say how the result is sharded.
_ASKING = ("dst_sharding", "out_sharding", "sharding")


def has_explicit_axes(jaxpr: Any) -> bool:
    """Whether a jaxpr was traced with shardings in types, or some of it under a mesh with such axes."""
    invars, outvars, eqns, _ = _compat.open_jaxpr(jaxpr)
    atoms = (*invars, *outvars, *(v for e in eqns for v in e.outvars))
    return (
        any(explicit_mesh(a.aval) is not None for a in atoms)
        or any(_is_explicit(_compat.traced_under(e)) for e in eqns)
        or any(has_explicit_axes(inner) for e in eqns for inner in _compat.subjaxprs(e))
    )


def with_auto_axes(jaxpr: Any) -> Any:
    """A closed jaxpr without shardings in its types."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return _Writer().jaxpr(jaxpr)


def result_shardings(jaxpr: Any) -> list[NamedSharding | None]:
    """The sharding that the type of each result has, over an abstract mesh; None where XLA decides it."""

    def of(aval: Any) -> NamedSharding | None:
        mesh = explicit_mesh(aval)
        return None if mesh is None or AxisType.Auto in mesh.axis_types else _auto(aval.sharding)

    return [of(a.aval) for a in _compat.open_jaxpr(jaxpr)[1]]


def unreduced_result(jaxpr: Any) -> str | None:
    """Why a function that returns a sum whose parts are not added up cannot be partitioned; else None."""
    for n, aval in enumerate(a.aval for a in _compat.open_jaxpr(jaxpr)[1]):
        if explicit_mesh(aval) is not None and (axes := sorted(aval.sharding.spec.unreduced)):
            return (
                f"returns a value (result {n}) that is unreduced over axis {axes[0]!r}, and is not one "
                "jax.jit as it runs: reduce it with jax.sharding.reshard"
            )
    return None


class _Writer:
    """Writes jaxprs without Explicit axes, each once."""

    def __init__(self) -> None:
        self.written: dict[int, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """A jaxpr, open or closed; the same object if it has none."""
        if id(jaxpr) not in self.written:
            env: dict[Var, Atom] = {}
            self.written[id(jaxpr)] = (
                _compat.rewrite_jaxpr(
                    jaxpr, lambda v: _new(v, env), lambda e: self.equations(e, env), lambda a: _read(a, env)
                )
                if has_explicit_axes(jaxpr)
                else jaxpr
            )
        return self.written[id(jaxpr)]

    def equations(self, eqn: Any, env: dict[Var, Atom]) -> list[Any]:
        """What an equation becomes; `env` learns its results."""
        asked = [_asked(eqn.params.get(key)) for key in _ASKING]
        invars, written = [_read(a, env) for a in eqn.invars], []
        if eqn.primitive.name in _RESHARD:
            env[eqn.outvars[0]] = invars[0]
        else:
            written = [
                _compat.as_traced_under(_auto_axes(_compat.traced_under(eqn)), eqn).replace(
                    invars=invars,
                    outvars=[_new(v, env) for v in eqn.outvars],
                    params={key: self.param(key, value) for key, value in eqn.params.items()},
                )
            ]
        for sharding in asked:
            if sharding is not None and len(eqn.outvars) == 1:
                constrain = lambda x, sharding=sharding: jax.lax.with_sharding_constraint(x, sharding)
                constraint, (made,) = trace_equations(constrain, env[eqn.outvars[0]], scope="")
                written += [e.eqn.replace(source_info=eqn.source_info) for e in constraint]
                env[eqn.outvars[0]] = made
        return written

    def param(self, key: str, value: Any) -> Any:
        """A parameter of an equation."""
        if isinstance(value, NamedSharding):
            return value if not _is_explicit(value.mesh) else None if key in _ASKING else _auto(value)
        if isinstance(value, _compat.JAXPR_TYPES):
            return self.jaxpr(value)
        if isinstance(value, Mesh | AbstractMesh):
            return _auto_axes(value)
        if isinstance(value, jax.core.ShapedArray):
            return _type(value)
        if isinstance(value, tuple) and value:
            parts = [self.param("", v) for v in value]
            if any(a is not b for a, b in zip(parts, value)):
                return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
        return value


def _new(v: Var, env: dict[Var, Atom]) -> Var:
    env[v] = made = jex.Var(_type(v.aval))
    return made


def _read(atom: Atom, env: dict[Var, Atom]) -> Atom:
    return read(env, atom) if is_var(atom) else jex.Literal(atom.val, _type(atom.aval))


def _type(aval: Any) -> Any:
    """A type without sharding; inside a shard_map, on a mesh whose other axes are Manual."""
    mesh = explicit_mesh(aval)
    if mesh is None:
        return aval
    if AxisType.Manual in mesh.axis_types:
        return aval.update(sharding=NamedSharding(_auto_axes(mesh), PartitionSpec(*[None] * aval.ndim)))
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _asked(sharding: Any) -> NamedSharding | None:
    """The constraint that a parameter asks for, if any."""
    explicit = isinstance(sharding, NamedSharding) and _is_explicit(sharding.mesh)
    return _auto(sharding) if explicit else None


def _auto(sharding: NamedSharding) -> NamedSharding:
    """The same sharding over Auto axes. What the type left to XLA, which had some axes, is left to it."""
    rest = PartitionSpec.UNCONSTRAINED if AxisType.Auto in sharding.mesh.axis_types else None
    spec = PartitionSpec(*(rest if entry is None else entry for entry in sharding.spec.partitions))
    return NamedSharding(_auto_axes(sharding.mesh), spec)


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _auto_axes(mesh: Any) -> Any:
    """A mesh with Auto axes in the place of Explicit ones."""
    if not _is_explicit(mesh):
        return mesh
    if isinstance(mesh, Mesh):
        return auto_mesh(mesh)
    explicit = [a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Explicit]
    return mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
