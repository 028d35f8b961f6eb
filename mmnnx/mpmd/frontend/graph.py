"""Walks over NNX objects and pytrees of them: the Variables and arrays in them, with their state paths."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mmnnx import _compat

Path = tuple[Any, ...]

ARRAYS = (jax.Array, jax.Ref)


def is_node(x: Any) -> bool:
    """Whether something is an NNX object: a graph node or a Variable."""
    return nnx.graph.is_graph_node(x) or isinstance(x, nnx.Variable)


def has_paths(x: Any) -> bool:
    """Whether state paths start at something: an NNX object, or the State of one."""
    return is_node(x) or isinstance(x, nnx.State)


def is_optax_state(x: Any) -> bool:
    """Whether something is the state of a transformation of optax, which is a NamedTuple."""
    return isinstance(x, tuple) and type(x).__module__.partition(".")[0] == "optax"


def kept_by_optimizers(tree: Any) -> set[int]:
    """The Variables and arrays that an optimizer keeps (mu, nu, ...), by id: of an `nnx.Optimizer`, or in
    state of optax itself."""
    values = list(nnx.iter_graph(tree, graph=True))
    of_optax = {path for path, value in values if is_optax_state(value)}
    return {
        id(value)
        for path, value in values
        if _compat.is_optimizer_state(value)
        or (isinstance(value, (nnx.Variable, *ARRAYS)) and _is_in(path, of_optax))
    }


def _is_in(path: Path, above: set[Path]) -> bool:
    return bool(above) and any(path[:n] in above for n in range(len(path)))


def nodes(trees: tuple) -> list[tuple[Path, Any]]:
    """Every Variable and graph node in (args, kwargs), in order, with its path."""
    return [(path, value) for path, value in nnx.iter_graph(trees, graph=True) if is_node(value)]


def changes(before: tuple, after: tuple) -> list[str]:
    """What differs in the NNX objects of (args, kwargs), but for arrays: "argument 0.calls from 0 to 1"."""

    def is_leaf(value: Any) -> bool:
        holds_others = nnx.graph.is_node(value) or isinstance(value, (nnx.Variable, *ARRAYS))
        return value is None or not holds_others

    def content(trees: tuple) -> dict[Path, Any]:
        return {
            path: value if is_leaf(value) else type(value)
            for path, value in nnx.iter_graph(trees, graph=True)
            if len(path) > 1 and not str(path[-1]).startswith("_pytree__")  # Flax's own attributes
        }

    def name(path: Path) -> str:
        return ".".join(map(str, (f"argument {path[1]}" if path[0] == 0 else path[1], *path[2:])))

    def text(value: Any) -> str:
        return value.__name__ if isinstance(value, type) else repr(value)

    old, new = content(before), content(after)
    made = [path for path in new if path not in old and path[:-1] in old]
    lost = [path for path in old if path not in new and path[:-1] in new]
    both = [(path, old[path], new[path]) for path in old if path in new]
    return [
        *(f"{name(path)} (new)" for path in made),
        *(f"{name(path)} (gone)" for path in lost),
        *(
            f"{name(path)} from {text(was)} to {text(now)}"
            for path, was, now in both
            if was is not now and was != now
        ),
    ]


def arrays_with_paths(value: Any) -> list[tuple[Path, Any]]:
    """The arrays and references of a Variable, with their paths where it holds a pytree; or one itself."""
    if not isinstance(value, nnx.Variable):
        return [((), value)] if isinstance(value, ARRAYS) else []
    leaves, _ = jax.tree_util.tree_flatten_with_path(value.get_raw_value())
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), a)
        for keys, a in leaves
        if isinstance(a, ARRAYS)
    ]


def arrays(value: Any) -> list[Any]:
    """The arrays and references of a Variable, or one itself."""
    return [a for _, a in arrays_with_paths(value)]


def all_paths(node: Any) -> list[tuple[Any, list[Path]]]:
    """Every Variable and array under a node, with all paths that lead to it (several if it is shared)."""
    found: dict[int, tuple[Any, list[Path]]] = {}

    def visit(value: Any, path: Path, above: tuple[int, ...]) -> None:
        if isinstance(value, (nnx.Variable, *ARRAYS)):
            found.setdefault(id(value), (value, []))[1].append(path)
        elif id(value) not in above:
            for key, child in _compat.children(value):
                visit(child, (*path, key), (*above, id(value)))

    visit(node, (), ())
    return list(found.values())
