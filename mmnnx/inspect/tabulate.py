"""``mm.tabulate``: what a model is made of, what it computes, and where it lives, as a table."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flax import nnx

from mmnnx.inspect.calls import Call, watch_calls
from mmnnx.inspect.homes import Home, Homes, in_order
from mmnnx.inspect.state import Contents, Piece, on_devices, take_stock
from mmnnx.inspect.table import html, make_tables, plain
from mmnnx.sharding.placement import Path, TaskSharding

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Row:
    """What the table says of one Module, or of the whole (path ()).

    Attributes:
      path: its path.
      type: the name of its class.
      calls: what went in and came out, each different call once.
      pieces: the arrays it holds itself.
      below: these and those of all Modules in it.
      shared: the Variables that it holds and another row counts: own path, the other path, kind.
      same_as: for a Module that is there already: its other path. It holds nothing then.
    """

    path: Path
    type: str
    calls: tuple[Call, ...] = ()
    pieces: tuple[Piece, ...] = ()
    below: tuple[Piece, ...] = ()
    shared: tuple[tuple[Path, Path, str], ...] = ()
    same_as: Path | None = None


@dataclass(frozen=True)
class ModelTable:
    """A table that shows itself: styled in a notebook, plain text in `str()`, styled text in `rich.print`.

    Attributes:
      name: the class of what is tabulated.
      rows: a row for each Module, parents first, children in the order of their calls.
      pieces: all arrays, shared ones once.
      traced: whether inputs and outputs are known.
    """

    name: str
    rows: tuple[Row, ...]
    pieces: tuple[Piece, ...]
    traced: bool

    @property
    def by_home(self) -> Mapping[Home | None, tuple[Piece, ...]]:
        """What lives where, in the order of the devices; None is for what lives nowhere in particular."""
        found: dict[Home | None, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.placed.home if piece.placed is not None else None, []).append(piece)
        narrow, wide = in_order(home for home in found if home is not None)
        return {home: tuple(found[home]) for home in (*narrow, *wide, None) if home in found}

    @property
    def by_device(self) -> Mapping[int, int]:
        """Bytes on each device, by its number."""
        return on_devices(self.pieces)

    @functools.cached_property
    def _tables(self) -> Group:
        return make_tables(self)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        return {"text/plain": str(self), "text/html": html(self._tables)}

    def __str__(self) -> str:
        return plain(self._tables)

    __repr__ = __str__  # what a terminal shows

    def __rich__(self) -> Group:
        return self._tables


def tabulate(
    model: Any,
    *inputs: Any,
    depth: int | None = None,
    sharding: TaskSharding | None = None,
    method: str | None = None,
    **kwargs: Any,
) -> ModelTable:
    """The modules of a model: types, inputs and outputs, parameters, and where these live.

    As `nnx.tabulate`, with the task, the spec, the devices and the bytes on each device, and with totals for
    each task and each device. Nothing is computed and no array is made: inputs and outputs come from an
    abstract trace, during which the `__call__` of each Module is watched.

    Each array counts once: where Modules or Variables are shared, the row of the first path (in Flax's order)
    has them and the others say "as" and that path. A Module without calls is in the table too. Keys and
    counts of random numbers are those of the Module that has them.

    Call it inside `with MultiMesh(...):` to see the names of tasks; the arrays know only their devices.
    Where several tasks have state on one submesh, all their names are there.

    Args:
      model: an NNX object, such as a Module or an `nnx.Optimizer`, real or of `nnx.eval_shape`.
      *inputs, **kwargs: what to call it with: arrays, `jax.ShapeDtypeStruct`s, NNX objects, or Python values,
        which stay as they are. Without any, and without `method`, it is not called.
      depth: rows for paths of this many keys at most; what is deeper counts in the row above it.
      sharding: a TaskSharding that says where state is going to live, for a model that is not placed yet.
        Default: what the arrays say.
      method: the method to call. Default: `__call__`.

    Returns:
      A `ModelTable`, which a notebook shows and `print` prints.

    Raises:
      TypeError: `model` is no NNX object, `sharding` no TaskSharding, or there is no such method.
      ValueError: a negative depth.
      PlacementError: state that `sharding` cannot place, or a filter of it that places nothing.

    Example:
      >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> print(mm.tabulate(model, jax.ShapeDtypeStruct((1, 2), "float32")))
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth= is the length of the longest paths to show, from 0, not {depth}")
    homes = Homes(sharding)
    contents = take_stock(model, homes)
    homes.check_used()
    traced = bool(inputs or kwargs or method)
    calls = watch_calls(model, inputs, kwargs, method or "__call__") if traced else {}
    rows = _rows(contents, calls, math.inf if depth is None else depth)
    return ModelTable(type(model).__name__, rows, contents.pieces, traced)


def _rows(contents: Contents, calls: Mapping[Path, Sequence[Call]], depth: float) -> tuple[Row, ...]:
    nodes = contents.nodes
    stateful = Counter(
        p.path[:n] for p in contents.pieces if p.kind != "RngState" for n in range(len(p.path))
    )
    modules = {path for path, node in nodes.items() if path == () or _has_row(node, bool(stateful[path]))}
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


def _has_row(node: Any, stateful: bool) -> bool:
    """Modules have rows; of what an optimizer is made of, what has a name, such as optax's named tuples."""
    return isinstance(node, nnx.Module) or (stateful and type(node) not in (tuple, list, dict))


def _owner(path: Path, modules: Iterable[Path]) -> Path:
    return max((m for m in modules if path[: len(m)] == m), key=len)
