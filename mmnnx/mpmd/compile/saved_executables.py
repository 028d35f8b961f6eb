"""Executables in a file: compiled for devices that may be only described, loaded where they are."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.compile.lower import Lowered

CodeKey = tuple[Any, Any]  # `Lowered.key`, and the options for XLA
Saved = tuple[bytes, tuple[int, ...]]  # what JAX serialized, and the ids of its devices

_loaded: dict[str, Saved] = {}


def save_executables(codes: Iterable[tuple[CodeKey, jax.stages.Compiled, Mesh]], path: Path) -> None:
    """Writes executables to a file, each with its key and the mesh that it is for."""
    found: dict[str, Saved] = {}
    for key, compiled, mesh in codes:
        if isinstance(key[0], tuple):  # else it is no other's
            payload, _, _ = serialize_executable.serialize(compiled)
            found[_name(key, mesh)] = payload, tuple(d.id for d in mesh.devices.flat)
    path.write_bytes(pickle.dumps((jax.__version__, found)))


def _name(key: CodeKey, mesh: Mesh) -> str:
    """What a program is called in files: the same in every process, and for all meshes of a shape."""
    (*of_program, _), options = key  # the last is its mesh
    what = (of_program, mesh.axis_names, mesh.devices.shape, options)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def load_executables(path: str | Path) -> int:
    """Makes `mm.jit` take from a file what `Plan.save` wrote there, in place of compiling it.

    What the file has not, or what the devices' runtime does not take, is compiled as ever. The file is
    unpickled, and may run any code: load only what you trust.

    Args:
      path: of the file.

    Returns:
      How many executables there are in it.

    Raises:
      ValueError: if another version of JAX wrote it, or it is no such file.

    Example:
      >>> mm.plan(train_step, model, optimizer, batch).save("step.executables")  # on a laptop
      >>> count = load_executables("step.executables")  # on the machine, before the first call of train_step
    """
    try:
        version, found = pickle.loads(Path(path).read_bytes())
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: this is no file of executables") from error
    if version != jax.__version__:
        raise ValueError(
            f"{path} was written with jax {version}, and here is jax {jax.__version__}: executables are for "
            "one version. Make the plan again with the version of the machine"
        )
    _loaded.update(found)
    return len(found)


def is_loaded(key: CodeKey, mesh: Mesh) -> bool:
    """Whether a file had the executable of a program."""
    return bool(_loaded) and isinstance(key[0], tuple) and _name(key, mesh) in _loaded


def load_saved(key: CodeKey, lowered: Lowered, mesh: Mesh) -> jax.stages.Compiled | None:
    """The executable of a program for a mesh, from what was loaded; None if it must be compiled."""
    if not is_loaded(key, mesh):
        return None
    payload, ids = _loaded[_name(key, mesh)]
    try:
        return _compat.load_serialized(payload, ids, lowered.stage, mesh)
    except Exception as error:  # runtimes refuse in their own ways
        said = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"an executable of the file is not for {', '.join(map(str, mesh.devices.flat))}, and is compiled "
            f"anew: {said}",
            stacklevel=2,
        )
        return None
