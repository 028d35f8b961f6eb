"""``mm.tabulate``: the modules of a model, their inputs and outputs, and where they live, as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax import nnx

from mmnnx.inspect.locations import Homes
from mmnnx.inspect.model_state import Contents, Piece, list_state
from mmnnx.inspect.model_table import ModelTable, Row
from mmnnx.inspect.module_calls import Call, record_calls
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.path_filter import Path
from mmnnx.sharding.placement import TaskSharding


def tabulate(
    model: Any,
    *inputs: Any,
    depth: int | None = None,
    sharding: TaskSharding | None = None,
    method: str | None = None,
    **kwargs: Any,
) -> ModelTable:
    """The modules of a model: types, inputs and outputs, parameters, and where these live.

    It is `nnx.tabulate` with the task, the spec, the devices and the bytes on each device, and with totals
    for each task and each device. Nothing is computed and no array is made: inputs and outputs come from an
    abstract trace that records the `__call__` of each Module.

    Each array counts once: shared Modules and Variables are in the row of their first path (in Flax's order),
    and the other rows say "as" and that path. A Module without calls has a row too, and so have the parts of
    a linen module in `nnx.bridge.ToNNX`. PRNG keys and counts are in the row of the Module that holds them.

    Call it inside `with MultiMesh(...):` to see the names of tasks; the arrays know only their devices. If
    several tasks have state on one submesh, all their names are shown.

    Args:
      model: an NNX object, such as a Module or an `nnx.Optimizer`, real or of `nnx.eval_shape`.
      *inputs, **kwargs: what to call it with: arrays, `jax.ShapeDtypeStruct`s, NNX objects, or Python values,
        which are passed as they are. Without any, and without `method`, it is not called.
      depth: the longest path, in keys, that has a row; deeper modules count in the row above them.
      sharding: a TaskSharding that says where state is going to live, for a model that is not placed yet.
        Default: the arrays' own shardings.
      method: the method to call. Default: `__call__`.

    Returns:
      A `ModelTable`, which a notebook shows and `print` prints.

    Raises:
      TypeError: `model` is no NNX object, `sharding` no TaskSharding, or there is no such method.
      ValueError: a negative depth.
      PlacementError: state that `sharding` cannot place, or a filter of it that places nothing.

    Example:
      >>> table = tabulate(model, batch[:, :-1], depth=1)  # print it, or have a notebook show it
      >>> [(row.path, row.type) for row in table.rows]
      [((), 'Model'), (('embed',), 'Embed'), (('blocks',), 'List'), (('head',), 'Linear')]
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth= is the length of the longest paths to show, from 0, not {depth}")
    homes = Homes(sharding)
    contents = list_state(model, homes)
    homes.check_used()
    traced = bool(inputs or kwargs or method)
    calls = record_calls(model, inputs, kwargs, method or "__call__") if traced else {}
    rows = _rows(contents, calls, math.inf if depth is None else depth)
    mesh = current_multimesh()
    return ModelTable(type(model).__name__, rows, contents.pieces, traced, () if mesh is None else mesh.idle)


def _rows(contents: Contents, calls: Mapping[Path, Sequence[Call]], depth: float) -> tuple[Row, ...]:
    nodes = contents.nodes
    stateful = Counter(
        p.path[:n] for p in contents.pieces if p.kind != "RngState" for n in range(len(p.path))
    )
    linen = {path for path, node in nodes.items() if isinstance(node, nnx.bridge.ToNNX)}
    modules = {
        path
        for path, node in nodes.items()
        if path == ()
        or _has_row(node, bool(stateful[path]), any(path[:n] in linen for n in range(len(path))))
    }
    own: dict[Path, list[Piece]] = {path: [] for path in modules}
    below: dict[Path, list[Piece]] = {path: [] for path in modules}
    for piece in contents.pieces:
        above = [piece.path[:n] for n in range(len(piece.path) + 1) if piece.path[:n] in modules]
        own[above[-1]].append(piece)
        for path in above:
            below[path].append(piece)
    rows = {
        path: Row(
            path,
            type(nodes[path]).__name__,
            tuple(calls.get(path, ())),
            tuple(own[path]),
            tuple(below[path]),
            tuple(
                (at[len(path) :], first, cls.__name__)
                for at, (first, cls) in contents.shared.items()
                if issubclass(cls, nnx.Variable) and _owner(at, modules) == path
            ),
        )
        for path in modules
    }
    for path, (first, cls) in contents.shared.items():
        if issubclass(cls, nnx.Module):
            rows[path] = Row(path, cls.__name__, same_as=first)
    places = {path: n for n, path in enumerate([*nodes, *contents.shared])}
    begun: dict[Path, int] = {}
    for number, path in enumerate(calls):
        for n in range(len(path) + 1):
            begun.setdefault(path[:n], number)

    def order(path: Path) -> list[tuple[int, int]]:
        prefixes = (path[:n] for n in range(len(path) + 1))
        return [(begun.get(prefix, len(calls)), places[prefix]) for prefix in prefixes]

    return tuple(rows[path] for path in sorted(rows, key=order) if len(path) <= depth)


def _has_row(node: Any, stateful: bool, in_linen: bool) -> bool:
    """Modules have rows, and so have the named tuples, and the like, of optimizer state; and the dicts that
    `nnx.bridge.ToNNX` makes of the submodules of a linen module."""
    plain = (tuple, list) if in_linen else (tuple, list, dict)
    return isinstance(node, nnx.Module) or (stateful and type(node) not in plain)


def _owner(path: Path, modules: Iterable[Path]) -> Path:
    return max((m for m in modules if path[: len(m)] == m), key=len)
