"""Makes the names of `multimesh.jax` importable for the rest of the process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What programs import, and the module that they get.
_ALIASES = {
    "multimesh.jax": "multimesh_compat.jax",
    "legate.jax": "multimesh_compat.jax",
    "jax_plugins.multimesh": "multimesh_compat.plugin",
    "jax_plugins.legate": "multimesh_compat.plugin",
}
_PACKAGES = tuple(dict.fromkeys(alias.partition(".")[0] for alias in _ALIASES))

_lock = threading.Lock()


def install() -> None:
    """Makes `multimesh.jax`, the earlier `legate.jax` and the plugin's `init` importable in this process.

    From here on `multimesh.jax` is `multimesh_compat.jax` under another name: the same module objects, so
    classes are the same and what was pickled under one name loads under the other. `multimesh.jax.flax` and
    other submodules come along. `jax_plugins.multimesh` and `jax_plugins.legate` are
    `multimesh_compat.plugin`. Packages around them that exist (`jax_plugins` with the CUDA plugin, a `legate`
    without `legate.jax`) stay as they are and get these modules; those that do not exist are made, empty.

    `jax.lax.with_sharding_constraint` takes logical names from here on, where `multimesh.jax`'s own does: in
    tasks, in `parallelize` and within `autoshard`. Elsewhere it is as it was.

    Nothing is imported before the program imports it, and nothing is written to disk. A second call does
    nothing. The call may come before or after `import jax`, and starts no backend. What was imported from
    `jax.lax` before stays as it was.

    Raises:
      ImportError: if a real `multimesh`, `legate.jax`, `jax_plugins.multimesh` or `jax_plugins.legate` could
        be imported, or a module that is no package has the name of one of the packages around them. Nothing
        has changed then.

    Example:
      >>> import multimesh_compat
      >>> multimesh_compat.install()
      >>> from jax_plugins import multimesh
      >>> multimesh.init(cpus=8)
      >>> import multimesh.jax as mm
      >>> mm.TaskMesh(devices=[0, 1, 2, 3], axis_sizes=[2, 2], axis_names=["x", "y"])
      TaskMesh(devices=(0, 1, 2, 3), axis_sizes=(2, 2), axis_names=('x', 'y'))
    """
    with _lock:
        if _aliases in sys.meta_path:
            return
        if found := _in_the_way():
            names = "\n".join(f"  {spec.name}: {_location(spec)}" for spec in found)
            raise ImportError(
                f"multimesh_compat.install() replaces nothing that is installed, and found\n{names}\n"
                "Leave out the call to use what is installed; else uninstall it, or take it off sys.path.",
                name=found[0].name,
                path=found[0].origin,
            )
        sys.meta_path.insert(0, _aliases)  # before the finder of files, which would load them a second time
        if "jax.lax" in sys.modules:
            _take_logical_names(sys.modules["jax.lax"])


class _Aliases(MetaPathFinder, Loader):
    """Finds modules by their other names; the modules themselves are imported under their own."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PACKAGES:
            return _find(fullname) or ModuleSpec(fullname, None, is_package=True)
        if fullname == "jax.lax":
            return _jax_lax()
        name = _own_name(fullname)
        found = None if name is None else importlib.util.find_spec(name)
        return None if found is None else ModuleSpec(fullname, self, origin=found.origin, loader_state=name)

    # Python sets __spec__ of what create_module returns; exec_module sets it back. To put the module into
    # sys.modules in exec_module instead would hand an empty one to a thread that imports at the same time.

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        self._specs.setdefault(module.__name__, module.__spec__)  # its own: no alias of it was loaded before
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]


_aliases = _Aliases()


def _jax_lax() -> ModuleSpec | None:
    """What loads `jax.lax`, and then has its constraints take logical names."""
    spec = _find("jax.lax")
    if spec is not None and spec.loader is not None:
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _take_logical_names(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _take_logical_names(lax: Any) -> None:
    """Has `jax.lax.with_sharding_constraint` take logical names where they are to be."""
    jax_own = lax.with_sharding_constraint

    @functools.wraps(jax_own)
    def with_sharding_constraint(x: Any, shardings: Any) -> Any:
        from multimesh_compat.jax.constraints import in_logical_names, with_sharding_constraint

        return (with_sharding_constraint if in_logical_names(shardings) else jax_own)(x, shardings)

    lax.with_sharding_constraint = with_sharding_constraint


def _own_name(fullname: str) -> str | None:
    for alias, name in _ALIASES.items():
        if fullname == alias or fullname.startswith(f"{alias}."):
            return name + fullname.removeprefix(alias)
    return None


def _in_the_way() -> list[ModuleSpec]:
    """What install would replace."""
    found = [spec for name in _PACKAGES if (spec := _find(name)) and spec.submodule_search_locations is None]
    # A directory without __init__.py that happens to be called multimesh is not an installation.
    multimesh = _find("multimesh")
    if multimesh and multimesh.origin and multimesh not in found:
        found.append(multimesh)
    return found + [spec for alias in _ALIASES if (spec := _find(alias))]


def _find(name: str) -> ModuleSpec | None:
    """What `import name` finds without the aliases; unlike `importlib.util.find_spec`, imports no parent."""
    if (module := sys.modules.get(name)) is not None:
        path = getattr(module, "__path__", None)
        spec = ModuleSpec(name, None, origin=getattr(module, "__file__", None), is_package=path is not None)
        spec.submodule_search_locations = path
        return spec
    path = None
    if parent := name.rpartition(".")[0]:
        package = _find(parent)
        if package is None or package.submodule_search_locations is None:
            return None
        path = package.submodule_search_locations
    specs = (f.find_spec(name, path) for f in sys.meta_path if f is not _aliases)
    return next((spec for spec in specs if spec is not None), None)


def _location(spec: ModuleSpec) -> str:
    return spec.origin or ", ".join(spec.submodule_search_locations or ["made by this process"])
