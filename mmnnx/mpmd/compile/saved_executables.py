"""Saved executables: in files, compiled for devices that may be only described; and in JAX's cache."""

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
from mmnnx.mpmd.compile.lower import loads_on_other_meshes
from mmnnx.mpmd.distributed.processes import is_described

CodeKey = tuple[Any, Any]  # `Lowered.key`, and the options for XLA
Saved = tuple[bytes, tuple[int, ...]]  # what JAX serialized, and the ids of its devices

_loaded: dict[str, dict[str, Saved]] = {}  # of each program, by the kind of devices that it is for


def save_executables(codes: Iterable[tuple[CodeKey, jax.stages.Compiled, Mesh]], path: Path) -> None:
    """Writes executables to a file, each with its key and the mesh that it is for."""
    found: dict[str, tuple[str, Saved]] = {}
    left_out = 0
    for key, compiled, mesh in codes:
        is_of_others = isinstance(key[0], tuple)
        if is_of_others and _lacks_graphs(compiled, mesh):
            left_out += 1
        elif is_of_others:
            found[_name(key, mesh)] = _kind(mesh), serialized(compiled, mesh)
    path.write_bytes(pickle.dumps((jax.__version__, found)))
    if left_out:
        warnings.warn(
            f"{path} lacks {left_out} programs, which call cuDNN: they are compiled on the machine",
            stacklevel=3,
        )


def _name(key: CodeKey, mesh: Mesh) -> str:
    """What a program is called in files: the same in every process, and for all meshes of a shape."""
    (*of_program, _), options = key  # the last is its mesh
    what = (of_program, mesh.axis_names, mesh.devices.shape, options)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _lacks_graphs(compiled: jax.stages.Compiled, mesh: Mesh) -> bool:
    """Whether it has no graphs of cuDNN, which makes them on a GPU: it would be loaded there, and fail."""
    device = mesh.devices.flat[0]
    return is_described(device) and device.platform != "tpu" and '"__cudnn$' in (compiled.as_text() or "")


def _kind(mesh: Mesh) -> str:
    return mesh.devices.flat[0].device_kind


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
    content = Path(path).read_bytes()
    try:
        version, found = pickle.loads(content)
        if not (isinstance(version, str) and all(isinstance(kind, str) for kind, _ in found.values())):
            raise TypeError(f"{type(version).__name__} and {type(found).__name__}")
    except Exception as error:  # pickle raises any
        raise ValueError(f"{path}: this is no file of executables") from error
    if version != jax.__version__:
        raise ValueError(
            f"{path} was written with jax {version}, and here is jax {jax.__version__}: executables are for "
            "one version. Make the plan again with the version of the machine"
        )
    for name, (kind, saved) in found.items():
        _loaded.setdefault(name, {})[kind] = saved
    return len(found)


def find_saved(key: CodeKey, mesh: Mesh) -> Saved | None:
    """What a file had, or JAX's persistent cache has, of a program."""
    if not isinstance(key[0], tuple):
        return None
    name = _name(key, mesh)
    if name in _loaded:
        if (known := _loaded[name].get(_kind(mesh))) is not None:
            return known
        kinds = ", ".join(_loaded[name])
        warnings.warn(
            f"saved executables are for {kinds}, and here is {_kind(mesh)}: they are compiled anew",
            stacklevel=2,
        )
    if (cache := _cache(mesh)) is None:
        return None
    try:
        found = cache.get(_entry(name))
        return None if found is None else pickle.loads(found)
    except Exception as error:  # as of a file that another process is writing, or a folder that is gone
        _warn_of_cache("read", error)
        return None


def keep_in_cache(key: CodeKey, mesh: Mesh, saved: Saved, seconds: float) -> None:
    """Puts a program into JAX's persistent cache, if there is one and it keeps what takes so long to compile.

    JAX's own entries cannot be loaded for other devices.
    """
    limits = jax.config.values
    if (
        (cache := _cache(mesh)) is not None
        and isinstance(key[0], tuple)
        and seconds >= limits["jax_persistent_cache_min_compile_time_secs"]
        and len(saved[0]) >= limits["jax_persistent_cache_min_entry_size_bytes"]
    ):
        try:
            cache.put(_entry(_name(key, mesh)), pickle.dumps(saved))
        except Exception as error:
            _warn_of_cache("write", error)


def _warn_of_cache(what: str, error: Exception) -> None:
    warnings.warn(f"could not {what} an entry of JAX's persistent cache: {_first_line(error)}", stacklevel=3)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _cache(mesh: Mesh) -> Any:
    return _compat.persistent_cache() if loads_on_other_meshes(mesh) else None


def _entry(name: str) -> str:
    """What a program is called in the cache: where another version, flag or processor may be next."""
    of_all = f"{name} {jax.__version__} {_compat.cache_environment()}"
    return f"mmnnx-{hashlib.sha256(of_all.encode()).hexdigest()}"


def serialized(compiled: jax.stages.Compiled, mesh: Mesh) -> Saved:
    """What can be saved and loaded of a program that was compiled for a mesh."""
    payload, _, _ = serialize_executable.serialize(compiled)
    return payload, tuple(d.id for d in mesh.devices.flat)


def load_saved(
    saved: Saved, like: jax.stages.Lowered | jax.stages.Compiled, mesh: Mesh
) -> jax.stages.Compiled | None:
    """A program, loaded for a mesh; None, with a warning, if the runtime refuses it.

    Args:
      saved: the program.
      like: the same, lowered or compiled for a mesh of this shape.
      mesh: where it is to run.
    """
    payload, ids = saved
    try:
        return _compat.load_serialized(payload, ids, like, mesh)
    except Exception as error:  # runtimes refuse in their own ways
        warnings.warn(
            f"a saved executable is not for {', '.join(map(str, mesh.devices.flat))}, and is compiled "
            f"anew: {_first_line(error)}",
            stacklevel=2,
        )
        return None
