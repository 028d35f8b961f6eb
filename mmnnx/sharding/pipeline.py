"""The placement of a stack of layers over the stages of a pipeline."""

from __future__ import annotations

import math
import operator
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby, permutations
from typing import Any

import jax
from flax import nnx

from mmnnx._compat import attribute_order
from mmnnx.sharding.division import Division
from mmnnx.sharding.layers import LAYERS, Layers, PlaceInModel, children_of, find, find_layers
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.path_filter import Path, path, path_text
from mmnnx.sharding.placement import PlacementError, TaskSharding
from mmnnx.sharding.rules import LogicalRules
from mmnnx.sharding.stacked import even_stages
from mmnnx.sharding.task import AxisRules, Task


def pipeline_sharding(
    model: Any,
    stages: int | Sequence[Task],
    layers: PlaceInModel | Set[PlaceInModel] | list[PlaceInModel | Set[PlaceInModel]] = LAYERS,
    *,
    first: str | Sequence[str] | None = None,
    last: str | Sequence[str] | None = None,
    rules: AxisRules | None = None,
    weights: Sequence[float] | None = None,
) -> TaskSharding:
    """A TaskSharding that partitions a model's layers over stages, consecutive layers on each.

    Of all partitions with at least one layer in each stage, it takes one whose largest stage is smallest; of
    these the most even; of these one whose early stages are shorter, since those keep saved activations of
    the most microbatches. Each Variable is sharded within its stage by its own logical axis names. State that
    several parts share lives with the first of them. Random keys outside of the layers (`nnx.Rngs`) get no
    rule, unless they are named: they are copied to every mesh.

    Args:
      model: an NNX module, real or abstract (`nnx.eval_shape`).
      stages: how many, for Tasks "stage0", "stage1", ... on slices of the current MultiMesh along its axis
        "stage"; or the Tasks themselves.
      layers: the path of the list of layers: "blocks", "decoder.blocks", or a tuple of keys. A
        `mmnnx.modules.Stack` there stands for the list of its segments, an `nnx.Sequential` for its layers. A
        module whose layers are stacked for a scan (`nnx.vmap` makes such, and a `Stack` with fewer segments
        than stages is one) is divided along its leading dimension (see `Division`), evenly if possible.
        `"layer_*"` is all attributes layer_0, layer_1 and so on, by their numbers; `"levels.*.blocks"` is the
        blocks of each level. A Python list of such paths is several stacks, one after the other; a set, such
        as `{"convs", "norms"}`, is lists side by side: item n of each is part of layer n. What `__init__`
        made between two layers, or two stacks, lives with the one before it, or with the one after it if that
        is deeper in the same submodule.
      first: what lives with the first stage, such as ("embed",) or "decoder.embed". Default: all that
        `__init__` made before the layers.
      last: what lives with the last stage. Default: all that `__init__` made after the layers.
      rules: the `logical_axes` of the Tasks that are made; see `logical_rules`.
      weights: a number for each layer (each segment of a Stack that is not divided) to balance by, such as
        its measured time. What `first` and `last` name then counts nothing. Default: the number of parameters
        (elements of `nnx.Param`, or of all Variables in a model without one), where `first` and `last` count
        too.

    Raises:
      PlacementError: the model has no such attribute, or it is no list of layers; there are fewer layers with
        state than stages; an attribute is in both `first` and `last`, or holds layers, or lies in them; both
        are given, and state is in neither; the order in which `__init__` made the attributes is not known,
        and some are not named; lists in a set are not as many.
      ValueError: no stages; `rules` next to Tasks; weights of another number, negative or not finite.
      TypeError: `stages` that are no Tasks.

    Warns:
      UserWarning: a rule was given to `logical_rules` by keyword, and no Variable of the model has its axis;
        a list that is not named has as many items as a list of layers, or one fewer, which may be parts of
        them; `stages` is a number, and slices of the current MultiMesh are left over.

    Example:
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(32, 4, rngs=rngs)
      ...         self.blocks = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(8))
      ...         self.head = nnx.Linear(4, 32, rngs=rngs)
      >>> placement = pipeline_sharding(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), 2)
      >>> for part, (task, spec) in zip(placement.filters, placement.rules):
      ...     print(part, task, spec)
      path('embed') task 'stage0' None
      path('blocks', range(0, 5)) task 'stage0' None
      path('blocks', range(5, 8)) task 'stage1' None
      path('head') task 'stage1' None
    """
    tasks = _tasks(stages, rules)
    places_of_layers = layers if isinstance(layers, list) else [layers]
    stacks, lengths = find_layers(model, places_of_layers, len(tasks))
    named: dict[str, list[Path] | None] = {}
    for side, names in (("first", first), ("last", last)):
        names = [names] if isinstance(names, str) else names
        named[side] = None if names is None else [find(model, f"{side}=", name)[0] for name in names]
    places = [("layers=", keys) for stack in stacks for keys in stack.roots]
    _check_apart([*places, *((f"{side}=", keys) for side in named for keys in named[side] or ())])

    if lengths:
        return _divided(model, stacks, lengths, named, tasks, weights, rules)
    all_parts = _parts(model, stacks, named)
    count = sum(len(stack.rows) for stack in stacks)
    holding = {part.layer for part in all_parts if part.is_layer and part.state}
    own_state = [n in holding for n in range(count)]
    _attach(all_parts, named, count)
    if len(tasks) > 1:
        _warn_of_lists(all_parts, stacks)
    parts = [part for part in all_parts if part.state and part.layer >= 0]
    if len(holding) < len(tasks):
        where = " and ".join(stack.text for stack in stacks)
        raise PlacementError(
            f"{len(holding)} of {count} layers in {where} hold state of their own, too few for "
            f"{len(tasks)} stages{_where_else(model, all_parts)}: "
            "use fewer stages or more layers (of a mmnnx.modules.Stack, more segments=)"
        )
    sizes: list[Any] = [0] * count
    for part in parts:
        sizes[part.layer] += part.parameters
    ends = balance(sizes if weights is None else _weights(weights, count), len(tasks), own_state)
    if isinstance(rules, LogicalRules):
        _warn_unused(rules, model)
    return _placement(parts, tasks, [bisect_right(ends, layer) for layer in range(count)])


def _divided(
    model: Any,
    stacks: Sequence[Layers],
    lengths: Sequence[int],
    named: dict[str, list[Path] | None],
    tasks: Sequence[Task],
    weights: Sequence[float] | None,
    rules: AxisRules | None,
) -> TaskSharding:
    """The same for layers that are stacked: evenly if that can be, else balanced as lists of layers are."""
    count = sum(lengths)
    if count < len(tasks):
        where = " and ".join(stack.text for stack in stacks)
        raise PlacementError(f"{count} layers are stacked in {where}, too few for {len(tasks)} stages")
    parts = _parts(model, stacks, named, lengths)
    _attach(parts, named, count)
    held = Counter[int]()
    for part in parts:
        if part.is_layer:
            held[part.layer] += part.parameters
    own = [held[end - length] for end, length in zip(accumulate(lengths), lengths)]
    sizes = [size / length for size, length in zip(own, lengths) for _ in range(length)]
    stage_of = even_stages(lengths, own, len(tasks)) if weights is None else None
    if stage_of is None:
        for part in parts:
            if not part.is_layer and part.layer >= 0:
                sizes[part.layer] += part.parameters
        ends = balance(sizes if weights is None else _weights(weights, count), len(tasks))
        stage_of = [bisect_right(ends, layer) for layer in range(count)]
    if isinstance(rules, LogicalRules):
        _warn_unused(rules, model)
    found: list[tuple[Any, Any]] = []
    for part in parts:
        if part.state and part.layer >= 0:
            on = Counter(stage_of[part.layer : part.back + 1] if part.is_layer else [stage_of[part.layer]])
            mine = [tasks[stage] for stage in sorted(on)]
            even = len(set(on.values())) == 1  # a sequence of tasks, of which one is as good as the task
            between = mine if even else Division(mine, sizes=[on[stage] for stage in sorted(on)])
            found.append((path(*part.path), (between, None)))
    return TaskSharding(found)


def balance(sizes: Sequence[Any], stages: int, holding: Sequence[bool] | None = None) -> list[int]:
    """Partitions a sequence into runs: the largest as small as can be, then most even, then shortest first.

    Args:
      sizes: the size of each item, not negative.
      stages: how many runs.
      holding: of each item whether it counts: every run has one that does. Default: all do.

    Returns:
      The end of each run, the last being `len(sizes)`.

    Example:
      >>> balance([1, 1, 1, 1, 4], 3)
      [2, 4, 5]
    """
    count = len(sizes)
    kept = list(accumulate(holding or [True] * count, initial=0))
    totals = [list(accumulate(sizes[i:])) for i in range(count)]  # from each item, of 1, 2, ... of them

    def starts(limit: Any) -> list[slice]:
        """For each end, where a run may start that ends there and is not larger than `limit`."""
        found, first = [slice(0, 0)], 0
        for j in range(1, count + 1):
            while first < j and totals[first][j - first - 1] > limit:
                first += 1
            found.append(slice(first, bisect_left(kept, kept[j])))
        return found

    def enough(limit: Any) -> bool:
        """Whether the runs are enough for none to be larger; fewer that are could be cut further."""
        runs: list[Any] = [0]
        for start in starts(limit)[1:]:
            runs.append(1 + min(runs[start], default=math.inf))
        return runs[count] <= stages

    candidates = sorted({total for row in totals for total in row})
    limit = candidates[bisect_left(candidates, True, key=enough)]

    # The least sum of squares, by dynamic programming over the number of runs: for each end the start of the
    # last one.
    allowed = starts(limit)
    squares = [[totals[i][j - i - 1] ** 2 for i in range(count)[start]] for j, start in enumerate(allowed)]
    table: list[Any] = [0] + [math.inf] * count
    last: list[list[int]] = []
    for _ in range(stages):
        sums = [list(map(operator.add, table[start], costs)) for start, costs in zip(allowed, squares)]
        table = [min(row, default=math.inf) for row in sums]
        last.append([s.start + row.index(t) if row else 0 for s, row, t in zip(allowed, sums, table)])
    ends = [count]
    for start_of in reversed(last[1:]):
        ends.append(start_of[ends[-1]])
    return ends[::-1]


# -------------------------------------------------------------------------------------- parts of the model


@dataclass
class _Part:
    """A submodule, Variable or array that lives in one place.

    Attributes:
      path: where it is in the model.
      is_layer: whether it is a layer, or a part of one.
      items: how many it has, if it is a list.
      state: the Variables and arrays in it that no part before it holds.
      parameters: how many parameters that state holds.
      unordered: why its place among the others is not known; empty if it is.
      layer: the number of the layer whose stage it lives with; -1 if it needs no rule.
      back: of a layer, the number that what lives behind it has; of a stack of layers that is its end.
      is_named: whether `first` or `last` say where it lives.
    """

    path: Path
    is_layer: bool
    items: int
    state: list[Any]
    parameters: int
    unordered: str
    layer: int
    back: int
    is_named: bool = False


def _parts(
    model: Any, stacks: Sequence[Layers], named: dict[str, list[Path] | None], lengths: Sequence[int] = ()
) -> list[_Part]:
    """The numbered layers, the named parts and those beside them, in the order that `__init__` made them.

    With `lengths`, layers are stacked: each stack is one part, with the numbers of its first and last layer.
    """
    rows = [row for stack in stacks for row in stack.rows]
    lengths = lengths or [1] * len(rows)
    numbers = {
        keys: (end - length, end - 1)
        for row, end, length in zip(rows, accumulate(lengths), lengths)
        for keys in row
    }
    apart = [*numbers, *(keys for side in named.values() for keys in side or ())]
    opened = {keys[:n] for keys in apart for n in range(len(keys))}
    leaves = [leaf for _, leaf in nnx.to_flat_state(nnx.state(model))]
    left = {id(leaf) for leaf in leaves}
    kind = nnx.Param if any(isinstance(leaf, nnx.Param) for leaf in leaves) else nnx.Variable
    parts: list[_Part] = []

    def visit(node: Any, at: Path, unordered: str) -> None:
        unordered = unordered or _why_unordered(node)
        for key, child in children_of(node):
            if (*at, key) in opened:
                visit(child, (*at, key), unordered)
                continue
            state = {id(leaf): leaf for _, leaf in nnx.iter_graph(child) if id(leaf) in left}
            left.difference_update(state)
            values = [leaf.get_raw_value() for leaf in state.values() if isinstance(leaf, kind)]
            parameters = sum(math.prod(array.shape) for array in jax.tree.leaves(values))
            here = (*at, key)
            items = len(child) if isinstance(child, nnx.List | list | tuple) else 0
            ends = numbers.get(here, (-1, -1))
            parts.append(
                _Part(here, here in numbers, items, list(state.values()), parameters, unordered, *ends)
            )

    visit(model, (), "")
    return parts


def _why_unordered(node: Any) -> str:
    """Why the order in which the parts of a module were made is not known; empty if it is."""
    if isinstance(node, nnx.bridge.ToNNX):
        return "nnx.bridge.ToNNX puts the parts of a linen module in alphabetical order"
    if isinstance(node, nnx.Pytree) and attribute_order(node) is None:
        return (
            f"the order in which {type(node).__name__}.__init__ made its attributes is lost, as nnx.merge, "
            "nnx.jit and nnx.eval_shape sort those of a Module with pytree=False"
        )
    return ""


def _attach(parts: Sequence[_Part], named: dict[str, list[Path] | None], count: int) -> None:
    """Sets, for each part that is no layer, the layer that it lives with."""
    ends = {"first": 0, "last": count - 1}
    unnamed, unordered = [], []
    for n, part in enumerate(parts):
        if part.is_layer or not part.state:
            continue
        by_name = [
            (len(keys), side) for side in ends for keys in named[side] or () if part.path[: len(keys)] == keys
        ]
        before = next((p for p in reversed(parts[:n]) if p.is_layer), None)
        after = next((p for p in parts[n:] if p.is_layer), None)
        if by_name:
            part.layer, part.is_named = ends[max(by_name)[1]], True
        elif all(isinstance(leaf, nnx.RngState) for leaf in part.state):
            continue
        elif part.unordered:
            unordered.append(part)
        elif before is not None and after is not None:
            before_is_nearer = _shared(part.path, before.path) >= _shared(part.path, after.path)
            part.layer = before.back if before_is_nearer else after.layer
        else:
            side = "last" if after is None else "first"
            part.layer = ends[side]
            if named[side] is not None:
                unnamed.append(path_text(part.path))
    if unordered:
        names = ", ".join(path_text(part.path) for part in unordered)
        raise PlacementError(f"{unordered[0].unordered}: first= or last= has to name {names}")
    if unnamed:
        raise PlacementError(f"{', '.join(unnamed)} would live nowhere: name it in first= or last=")


def _where_else(model: Any, parts: Sequence[_Part]) -> str:
    """Where a layer without state of its own has it, for a message; nothing if none has any."""
    for layer in parts:
        if layer.is_layer and not layer.state:
            held = {id(leaf) for _, leaf in nnx.iter_graph(find(model, "layers=", layer.path)[1])}
            for part in parts:
                if any(id(leaf) in held for leaf in part.state):
                    here, there = path_text(layer.path), path_text(part.path)
                    return f" (what is in {here} is in {there} too, which was made first)"
    return ""


def _shared(path: Path, other: Path) -> int:
    return next((n for n, (a, b) in enumerate(zip(path, other)) if a != b), 0)


# ----------------------------------------------------------------------------------------------- arguments


def _tasks(stages: int | Sequence[Task], rules: AxisRules | None) -> list[Task]:
    if isinstance(stages, int):
        if stages < 1:
            raise ValueError(f"a pipeline has at least one stage, not {stages}")
        _warn_of_idle_slices(stages)
        return [Task(f"stage{i}", mesh_slice={"stage": i}, logical_axes=rules) for i in range(stages)]
    tasks = list(stages) if isinstance(stages, Iterable) else [stages]
    if not all(isinstance(task, Task) for task in tasks):
        raise TypeError(f"stages= is how many, or a sequence of Tasks, not {stages!r}")
    if not tasks:
        raise ValueError("stages= has no Task: a pipeline has at least one stage")
    if rules is not None:
        raise ValueError("rules= is for Tasks that are made here: give your own Tasks logical_axes= instead")
    return tasks


def _warn_of_idle_slices(stages: int) -> None:
    mesh = current_multimesh()
    slices = mesh.shape.get("stage", 0) if mesh is not None else 0
    if stages < slices:
        warnings.warn(
            f"{stages} stages leave {slices - stages} of the {slices} slices of {mesh!r} along 'stage' idle: "
            f"take stages={slices}, or a MultiMesh with stage={stages}. If these slices are for something "
            "else, give your own Tasks as stages=",
            stacklevel=4,
        )


def _check_apart(places: Sequence[tuple[str, Path]]) -> None:
    """Refuses layers inside other layers, and names inside or around layers; names may lie inside names."""
    for (what, keys), (other, longer) in permutations(places, 2):
        if longer[: len(keys)] == keys and (keys == longer or "layers=" in (what, other)):
            raise PlacementError(
                f"{path_text(longer)} of {other} lies in {path_text(keys)} of {what}: "
                "each part of the model has one place"
            )


def _weights(weights: Sequence[float], count: int) -> list[float]:
    weights = list(weights)
    if len(weights) != count:
        raise ValueError(f"weights= has {len(weights)} numbers, and there are {count} layers (or segments)")
    wrong = [weight for weight in weights if not 0 <= weight < math.inf]
    if wrong:
        raise ValueError(f"weights= are finite and not negative, and has {', '.join(map(str, wrong))}")
    return weights


def _warn_unused(rules: LogicalRules, model: Any) -> None:
    unused = rules.given.intersection(rules.unused(model))
    if unused:
        warnings.warn(
            f"logical_rules was given a rule for {', '.join(map(repr, sorted(unused)))}, and no Variable of "
            f"{type(model).__name__} has such an axis",
            stacklevel=3,
        )


# -------------------------------------------------------------------------------------------------- result


def _warn_of_lists(parts: Sequence[_Part], stacks: Sequence[Layers]) -> None:
    """Norms in a list of their own, say, would all live with one stage, and the flow come to it for each."""
    warned: set[str] = set()
    for part in parts:
        fitting = [s for s in stacks if part.items in (len(s.rows), len(s.rows) - 1)]
        if not fitting or part.items < 2 or part.layer < 0 or part.is_layer or part.is_named:
            continue
        beside = max(fitting, key=lambda s: _shared(part.path, s.roots[0]))
        name, own = path_text(part.path), path_text(_as_pattern(part.path, beside.roots[0], stacks))
        if own not in warned:
            warnings.warn(
                f"{name} has {part.items} items beside the {len(beside.rows)} layers of {beside.text}, and "
                "all of them live with one stage: if item n is part of layer n, name both in a set, as "
                f"layers={{..., {own!r}}}; else name {name!r} in first= or last=",
                stacklevel=3,
            )
        warned.add(own)


def _as_pattern(path: Path, root: Path, stacks: Sequence[Layers]) -> Path:
    """A path with "*" for each number that `root` has too, and other lists of layers have not."""
    keys = list(path)
    for other in (s.roots[0] for s in stacks if len(s.roots[0]) == len(root)):
        differ = [n for n, (a, b) in enumerate(zip(root, other)) if a != b]
        for n in differ if len(differ) == 1 else ():
            if isinstance(root[n], int) and path[: n + 1] == root[: n + 1]:
                keys[n] = "*"
    return tuple(keys)


def _placement(parts: Sequence[_Part], tasks: Sequence[Task], stage_of: Sequence[int]) -> TaskSharding:
    """One rule for each run of layers and for each other part, in the order of the model.

    The order matters: of several rules for shared state the first decides.
    """
    rules = []

    def run(part: _Part) -> tuple[Path, int]:
        return part.path[:-1] if part.is_layer else part.path, stage_of[part.layer]

    for (keys, stage), group in groupby(parts, run):
        members = list(group)
        if members[0].is_layer:
            keys = (*keys, _one_key([part.path[-1] for part in members]))
        rules.append((path(*keys), (tasks[stage], None)))
    return TaskSharding(rules)


def _one_key(keys: Sequence[Any]) -> Any:
    """One key of a `path` for several neighbours."""
    if len(keys) == 1:
        return keys[0]
    return tuple(keys) if isinstance(keys[0], str) else range(keys[0], keys[-1] + 1)
