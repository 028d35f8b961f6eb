"""The layers of a model, found by the path that a user gives: a list, attributes with numbers, or a stack."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
      path: the list of them, the module whose attributes they are, or what is stacked for a scan.
      keys: of each layer in there: a range for a list; None if they are stacked.
    """

    path: Path
    keys: range | tuple[Any, ...] | None = None

    @property
    def roots(self) -> list[Path]:
        """The path of what has the layers and nothing else, or else of each layer."""
        return [self.path] if isinstance(self.keys, range) else self.places

    @property
    def places(self) -> list[Path]:
        """The path of each layer, or of what is stacked."""
        return [self.path] if self.keys is None else [(*self.path, key) for key in self.keys]

    @property
    def text(self) -> str:
        """What messages call them."""
        if self.keys is None or isinstance(self.keys, range):
            return path_text(self.path)
        return f"{path_text(self.places[0])} to {path_text(self.places[-1])}"


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
    numbered = Counter(re.sub(r"\d+", "*", name) for name in names)
    pattern = next((pattern for pattern, count in numbered.items() if count > 1), None)
    return "" if pattern is None else f"; {pattern!r} stands for those with a number there"


def find_layers(model: Any, places: Sequence[PlaceInModel], stages: int) -> tuple[list[Layers], list[int]]:
    """The runs of layers. If there are fewer layers than stages, and each is stacked: what is stacked, and
    how many layers are in each.
    """
    runs = [run for place in places for run in _runs(model, place)]
    layers = [(keys, find(model, "layers=", keys)[1]) for run in runs for keys in run.places]
    lengths = [stacked_length(node) for _, node in layers]
    stacked = next((run.path for run in runs if run.keys is None), None)
    if (stacked is not None or len(layers) < stages) and all(lengths):
        return [Layers(keys) for keys, _ in layers], [n for n in lengths if n]
    if stacked is not None:
        node = dict(layers)[stacked]
        raise PlacementError(
            f"layers= has {path_text(stacked)!r}, a {type(node).__name__} and no list of layers, and its "
            "arrays have no leading dimension in common along which layers would be stacked"
            if stacked_length(node) is None
            else f"layers= has stacked layers in {path_text(stacked)!r} and lists of layers as well: place "
            "the two with rules of your own"
        )
    return runs, []


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
        return [Layers(above, tuple(key for _, key in numbered))]
    return [run for _, key in numbered for run in _runs(model, (*above, key, *keys[n + 1 :]))]


def _list_in(keys: Path, node: Any) -> Layers:
    """The list of layers at a place, or in what is there; else what is there, as if they were stacked."""
    if isinstance(node, nnx.List | list | tuple):
        return Layers(keys, range(len(node)))
    inner = {key: child for key, child in children_of(node) if isinstance(child, nnx.List | list | tuple)}
    name = next((name for name in ("segments", "layers") if name in inner), None)
    return Layers(keys) if name is None else Layers((*keys, name), range(len(inner[name])))


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
