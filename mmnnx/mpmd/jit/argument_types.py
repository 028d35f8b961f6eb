"""The types of arguments: shapes, dtypes, and shardings over Explicit axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from mmnnx.mpmd.ir.shardings import explicit_mesh


def avals_of(leaves: Sequence[Any], typed: bool = True) -> list[jax.ShapeDtypeStruct]:
    """The types of arguments.

    Args:
      leaves: the arguments.
      typed: whether shardings over Explicit axes are part of them.

    Raises:
      TypeError: for what is no array.
    """
    typed = typed and typed_mesh(leaves) is not None
    return [_aval_of(x, typed) for x in leaves]


def typed_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with Explicit axes that arguments are on; None if there is none, or if they differ.

    Where they differ the axes count as Auto: no type has shardings over two meshes.
    """
    meshes = explicit_meshes(leaves)
    return meshes[0] if len(meshes) == 1 else None


def explicit_meshes(leaves: Sequence[Any]) -> list[AbstractMesh]:
    """The meshes with Explicit axes that arguments are on."""
    arrays = (x for x in leaves if isinstance(x, jax.Array | jax.ShapeDtypeStruct))
    found = (explicit_mesh(jax.typeof(x)) for x in arrays)
    return [mesh for mesh in dict.fromkeys(found) if mesh is not None]


def mesh_in_types(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Inside it PartitionSpecs name axes of a mesh in types of arguments, if no other is set."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    return contextlib.nullcontext() if mesh is None or is_set else jax.sharding.use_abstract_mesh(mesh)


def explain(error: Exception, meshes: Iterable[Any]) -> None:
    """Adds to what JAX says against shardings in types on which meshes they are, and what to do."""
    axes = list(dict.fromkeys(str(dict(mesh.shape)) for mesh in meshes))
    several = "Types have shardings over one mesh alone: give all the same axes and sizes. "
    error.add_note(
        f"Arguments or tasks are on meshes with Explicit axes, {' and '.join(axes)}, where types have "
        f"shardings. {several if len(axes) > 1 else ''}For XLA to decide shardings, make the mesh with "
        "axis_types=(jax.sharding.AxisType.Auto,) * number of axes"
    )


def explain_auto(error: Exception) -> None:
    """Adds to what JAX says against shardings in types where there are none."""
    if "mesh context" in str(error) or "type Auto" in str(error):
        error.add_note(
            "The axes of a MultiMesh are Auto: there mm.with_sharding_constraint shards a value. "
            "jax.sharding.reshard and out_sharding= are for arguments, and tasks with mesh=, on meshes with "
            "Explicit axes, as jax.make_mesh makes them"
        )


def _aval_of(x: Any, typed: bool) -> jax.ShapeDtypeStruct:
    try:
        aval = jax.typeof(x)
    except TypeError as error:
        raise TypeError(
            f"{error}. Name arguments that are no arrays by static_argnums or static_argnames"
        ) from None
    # Without other shardings: they differ between a process that has the array and one that has not.
    sharding = aval.sharding if typed and explicit_mesh(aval) is not None else None
    is_ref = isinstance(x, jax.Ref) or getattr(x, "is_ref", False)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type, is_ref=is_ref
    )
