"""The layers of a model, found by the path that a user gives: a list, attributes with numbers, or a stack."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from flax import nnx

from mmnnx._compat import attribute_order
from mmnnx.sharding.path_filter import Path, path_text
from mmnnx.sharding.placement import PlacementError
from mmnnx.sharding.rules import did_you_mean
from mmnnx.sharding.stacked import stacked_length

LAYERS = "blocks"
"""What the models of `mmnnx.modules` call their list of layers."""

PlaceInModel = str | tuple[str | int, ...]
"""A path with dots, or its keys."""


@dataclass(frozen=True)
class Layers:
    """A run of layers.

    Attributes:
      text: what messages call it.
      roots: the paths of what has these layers, and nothing else.
      rows: the paths that each layer is made of; if layers are stacked for a scan, one row for all.
      stacked: whether they are.
    """

    text: str
    roots: tuple[Path, ...]
    rows: tuple[tuple[Path, ...], ...]
    stacked: bool = False


def _keys(place: PlaceInModel) -> tuple[str | int, ...]:
    return tuple(place.split(".")) if isinstance(place, str) else place


def find(model: Any, what: str, place: PlaceInModel) -> tuple[Path, Any]:
    """The keys of a place in the model, as in paths of state, and what is there."""
    node: Any = model
    found: Path = ()
    for wanted in _keys(place):
        children = {str(key): (key, child) for key, child in children_of(node)}
        if str(wanted) not in children:
            names = _names(node)
            default = " by default" if (what, place) == ("layers=", LAYERS) else ""
            raise PlacementError(
                f"{what} has {place!r}{default}, and {path_text(found) or type(model).__name__} has no "
                f"{wanted!r}{did_you_mean(str(wanted), names)}: it has {', '.join(names) or 'nothing'}"
                + (_other_ways(model, place, str(wanted), names) if what == "layers=" else "")
            )
        key, node = children[str(wanted)]
        found = (*found, key)
    return found, node


def _other_ways(model: Any, place: PlaceInModel, wanted: str, names: Sequence[str]) -> str:
    """What else may be meant by a path of layers that leads nowhere."""
    if isinstance(place, tuple) and ("." in wanted or wanted in (str(key) for key, _ in children_of(model))):
        return f"; a tuple is the keys of one path: for several lists of layers write {list(place)!r}"
    numbered: dict[str, list[str]] = {}
    for name in names:
        numbered.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    pattern, alike = next(((p, found) for p, found in numbered.items() if len(found) > 1), ("", []))
    return f"; for {alike[0]}, {alike[1]} and so on write {pattern!r}" if alike else ""


def find_layers(
    model: Any, places: Sequence[PlaceInModel | Set[PlaceInModel]], stages: int
) -> tuple[list[Layers], list[int]]:
    """The runs of layers. If one is given as a stack, or there are fewer layers than stages, and all of them
    are stacked: what is stacked, and how many layers are in each.
    """
    runs = [run for place in places for run in _side_by_side(model, place)]
    if not runs:
        raise PlacementError("layers= is empty: give the path of the layers")
    rows = [row for run in runs for row in run.rows]
    lengths = [_length(model, row) for row in rows]
    stacked = next((run for run in runs if run.stacked), None)
    if (stacked is not None or len(rows) < stages) and all(lengths):
        divided = [Layers(" with ".join(map(path_text, row)), row, (row,), stacked=True) for row in rows]
        return divided, [n for n in lengths if n]
    if stacked is not None:
        node = find(model, "layers=", stacked.roots[0])[1]
        raise PlacementError(
            f"layers= has {stacked.text!r}, a {type(node).__name__} and no list of layers, and its "
            "arrays have no leading dimension in common along which layers would be stacked"
            if _length(model, stacked.roots) is None
            else f"layers= has stacked layers in {stacked.text!r} and lists of layers as well: place "
            "the two with rules of your own"
        )
    return runs, []


def _length(model: Any, row: Sequence[Path]) -> int | None:
    """How many layers are stacked in each of these; None if they have no number in common."""
    lengths = {stacked_length(find(model, "layers=", keys)[1]) for keys in row}
    return lengths.pop() if len(lengths) == 1 else None


def _side_by_side(model: Any, place: PlaceInModel | Set[PlaceInModel]) -> list[Layers]:
    """The runs of layers that a path stands for, or a set of paths: item n of each is part of layer n."""
    places = sorted(place, key=str) if isinstance(place, Set) else [place]
    found = [_runs(model, one) for one in places]
    if len({len(runs) for runs in found}) > 1:
        counts = ", ".join(f"{one!r} is {len(runs)}" for one, runs in zip(places, found))
        raise PlacementError(f"layers= has lists side by side that are not as many: {counts}")
    joined = []
    for runs in zip(*found):
        text = " with ".join(run.text for run in runs)
        if len({run.stacked for run in runs}) > 1:
            raise PlacementError(f"layers= has {text} side by side, and not all of them are lists of layers")
        rows = zip_longest(*(run.rows for run in runs), fillvalue=())
        roots = tuple(keys for run in runs for keys in run.roots)
        joined.append(Layers(text, roots, tuple(tuple(chain(*row)) for row in rows), runs[0].stacked))
    return joined


def _runs(model: Any, place: PlaceInModel) -> list[Layers]:
    """The runs of layers that a path stands for, "*" in it being any number."""
    keys = _keys(place)
    n = next((n for n, key in enumerate(keys) if "*" in str(key)), None)
    if n is None:
        return [_list_in(*find(model, "layers=", place))]
    above, node = find(model, "layers=", keys[:n])
    pattern = re.compile(re.escape(str(keys[n])).replace(r"\*", r"(\d+)"))
    matches = [(pattern.fullmatch(str(key)), key) for key, _ in children_of(node)]
    numbered = sorted((tuple(map(int, match.groups())), key) for match, key in matches if match)
    if not numbered:
        raise PlacementError(
            f"layers= has {place!r}, and {path_text(above) or type(model).__name__} has no {keys[n]!r} with "
            f"a number for the '*': it has {', '.join(_names(node)) or 'nothing'}"
        )
    if n == len(keys) - 1:
        found = tuple((*above, key) for _, key in numbered)
        return [Layers(f"{path_text(found[0])} to {path_text(found[-1])}", found, tuple((f,) for f in found))]
    return [run for _, key in numbered for run in _runs(model, (*above, key, *keys[n + 1 :]))]


def _list_in(keys: Path, node: Any) -> Layers:
    """The list of layers at a place, or in what is there; else what is there, as if they were stacked."""
    if isinstance(node, nnx.List | list | tuple):
        return Layers(path_text(keys), (keys,), tuple(((*keys, n),) for n in range(len(node))))
    inner = {key: child for key, child in children_of(node) if isinstance(child, nnx.List | list | tuple)}
    name = next((name for name in ("segments", "layers") if name in inner), None)
    if name is not None:
        return _list_in((*keys, name), inner[name])
    return Layers(path_text(keys), (keys,), ((keys,),), stacked=True)


def _names(node: Any) -> list[str]:
    """The children that may hold state."""
    kinds = nnx.Pytree | nnx.Variable | list | tuple | dict
    return [str(key) for key, child in children_of(node) if isinstance(child, kinds)]


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """Keys, as in paths of state, and values of an NNX object or container; of anything else, none."""
    if isinstance(node, nnx.List | list | tuple):
        return list(enumerate(node))
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, nnx.Pytree):
        names = attribute_order(node)
        own = {name: child for name, child in vars(node).items() if not name.startswith("_pytree__")}
        return [(name, own[name]) for name in (own if names is None else names)]
    return []
