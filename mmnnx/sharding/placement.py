"""`TaskSharding`: rules that give each piece of state a task and a sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx._shown import Shown
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.division import Division
from mmnnx.sharding.logical import logical_names, logical_spec
from mmnnx.sharding.path_filter import Path, PathPattern, is_catch_all, path_text
from mmnnx.sharding.task import Task

MOST_RULES = 3  # that the repr of a TaskSharding has


class PlacementError(ValueError):
    """State that a TaskSharding cannot place as it says; raised before anything runs.

    Example:
      >>> try:
      ...     mm.jit(make, out_shardings=TaskSharding({mm.path("emed"): (stages[0], P())}), mesh=mesh)()
      ... except PlacementError as error:
      ...     print("refused")
      refused
    """


@dataclass(frozen=True)
class Match:
    """Where one piece of state lives.

    Attributes:
      task: its task, or the tasks that it is divided between.
      sharding: its sharding on the task's mesh, or on those of all tasks.
      index: which rule of the TaskSharding said so, from 0.
      own: whether the rule is for this state itself; optimizer state may have the rule of its parameter.
    """

    task: Task | Division
    sharding: NamedSharding
    index: int
    own: bool = True


class TaskSharding(Shown, nnx.StateSharding):
    """A `nnx.StateSharding` whose values name a task: which state lives where.

    Args:
      rules: a mapping from NNX filters (`path(...)` makes one from a path pattern) to (task, spec), or an
        iterable of such pairs. The first filter that matches decides. A spec shards the leading dimensions
        over axes of the task's mesh and replicates the rest. With a spec of None, or a Task alone, the
        Variable's own logical axis names are translated by the task's `logical_axes`; without names it is
        replicated. In the place of the task may be a sequence of tasks, between which the first dimension is
        divided, or a `Division`, which can name another one. The spec is that of each piece then.

    Raises:
      TypeError: a key that is no filter, or a value that is not (Task, PartitionSpec | None).

    Example:
      >>> from mmnnx.sharding import TaskMesh, path
      >>> one = Task("one", mesh=TaskMesh(devices=[0], axis_names=("model",)))
      >>> placement = TaskSharding({path(..., "kernel"): (one, PartitionSpec(None, "model")), ...: one})
      >>> placement.lookup(("dense", "kernel"), jax.numpy.ones((2, 4))).sharding.spec
      P(None, 'model')
    """

    def __init__(self, rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | nnx.State, /):
        try:
            super().__init__(rules)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"a TaskSharding is made of {{filter: (task, spec)}}, or of such pairs, not of {rules!r}"
            ) from error
        self._filters = tuple(tuple(f) if isinstance(f, list) else f for f in self._filters)
        self._rules = tuple(map(_normal_rule, self._filters, self._shardings))
        self._predicates = tuple(map(_predicate, self._filters))

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, in order."""
        return self._filters

    @property
    def rules(self) -> tuple[tuple[Task | Division, PartitionSpec | None], ...]:
        """(task or Division, spec) of each filter, in order."""
        return self._rules

    def rule_text(self, index: int) -> str:
        """A rule as tables and messages name it: "rule 0: path('blocks', range(0, 2))"."""
        filter = self._filters[index]
        return f"rule {index}: {'...' if filter is ... else repr(filter)}"

    @property
    def shardings(self) -> tuple[PartitionSpec, ...]:
        """The spec of each filter, as `nnx.shard_map` reads them; P() where it depends on the Variable."""
        return tuple(PartitionSpec() if spec is None else spec for _, spec in self._rules)

    def lookup(self, path: Path, variable: Any) -> Match:
        """Where the state at `path` lives.

        Args:
          path: its path, a tuple of keys.
          variable: a Variable holding arrays, tracers or `jax.ShapeDtypeStruct`s, or one of these itself.
            PRNG keys count by their logical shape.

        Raises:
          PlacementError: no filter matches; the spec is longer than the array has dimensions, names an axis
            that the task's mesh lacks or one axis twice, or does not divide a dimension evenly.
        """
        index = self._first_match(path, variable)
        if index is None:
            raise PlacementError(self._nothing_matches(path, variable))
        return self._match(index, path, variable)

    def lookup_optimizer_state(
        self,
        paths: Sequence[Path],
        variable: nnx.Variable,
        parameters: Mapping[Path, Sequence[Any]] = MappingProxyType({}),
    ) -> Match | None:
        """Where a Variable of an optimizer lives: by a rule of its own, else by that of its parameter.

        Its path ends with the path of its parameter. A rule is its own if it does not match the parameter. By
        its parameter's rule it is sharded as `aligned_spec` says. Logical axis names are its own if it has
        some, such as from Flax's `optimizer_sharding`, else those of its parameter.

        Args:
          paths: all paths to it, such as ("opt_state", 0, "mu", "dense", "kernel").
          variable: the Variable.
          parameters: the Variables and arrays that may be its parameter, by path, as far as they are known;
            several models may have one path. If none of these paths is the end of its own, any end may be the
            parameter's path, and the parameter is taken to have its shape.

        Returns:
          None if no rule matches it or its parameter. If the parameter's rule does not fit, the Variable is
          replicated over the mesh.

        Raises:
          PlacementError: a rule of its own does not fit, as for `lookup`.
        """
        ends = [path[n:] for path in paths for n in range(1, len(path))]
        known = next((end for end in ends if end in parameters), None)  # the longest comes first
        ends = ends if known is None else [known]
        if known is None:
            parameter = nnx.Param(variable.get_raw_value())
        else:
            alike = (p for p in parameters[known] if _shapes(p) == _shapes(variable))
            parameter = next(alike, parameters[known][0])
        matching = {i for path in paths if (i := self._first_match(path, variable)) is not None}
        own = [i for i in matching if not any(self._predicates[i](end, parameter) for end in ends)]
        if own:
            return self._match(min(own), paths[0], variable)
        found = {i: end for end in ends if (i := self._first_match(end, parameter)) is not None}
        # A rule for all that is left matches any end of the path, whatever rule the parameter has.
        particular = [i for i in found if not is_catch_all(self._filters[i])]
        if not found:
            return None
        index = min(particular or found)
        try:
            match = self._match(index, found[index], parameter, named=variable)
            mesh = match.sharding.mesh
            spec = _optimizer_spec(match.sharding.spec, parameter, variable)
            names = logical_names(variable) if self._rules[index][1] is None else None
            if known is None and names is not None and {len(names)} != set(map(len, _shapes(variable))):
                spec = PartitionSpec()  # they are those of a parameter of another shape
        except PlacementError:
            spec, mesh = PartitionSpec(), self._rules[index][0].to_mesh()
        task = self._rules[index][0]
        return Match(task, NamedSharding(mesh, spec), index, own=False)

    def _match(self, index: int, path: Path, variable: Any, named: Any = None) -> Match:
        """Where a rule places state. `named`, if it has logical axis names, has them for `variable`."""
        task, spec = self._rules[index]
        origin = f"{self._filters[index]!r}: ({task}, {spec})"
        if spec is None:
            of = variable if logical_names(named) is None else named
            spec, origin = self._metadata_spec(path, of, task), f"its logical axes, for {task}"
        what = f"{_describe(path, variable)} by {origin}"
        if isinstance(task, Division):
            return Match(task, _divided(task, spec, _shapes(variable), what), index)
        mesh = task.to_mesh()
        for shape in _shapes(variable):
            _check_spec(spec, shape, mesh, what)
        return Match(task, NamedSharding(mesh, spec), index)

    def map_prefix(self, path: Path, variable: Any) -> NamedSharding:
        """The sharding of the state at `path`, which NNX calls for a StateSharding.

        NNX calls it for the shards inside a shard_map too, so sizes are not checked here.
        """
        index = self._first_match(path, variable)
        if index is None:
            raise PlacementError(self._nothing_matches(path, variable))
        task, spec = self._rules[index]
        spec = self._metadata_spec(path, variable, task) if spec is None else spec
        if isinstance(task, Division):
            return _divided(task, spec, _shapes(variable), _describe(path, variable))
        return NamedSharding(task.to_mesh(), spec)

    def check_used(self, matched: set[int]) -> None:
        """Raise PlacementError for rules that placed nothing, given the indices of those that did.

        A rule for all that is left may place nothing.
        """
        unused = [
            (filter, task)
            for index, (filter, (task, _)) in enumerate(zip(self._filters, self._rules, strict=True))
            if index not in matched and not is_catch_all(filter)
        ]
        if unused:
            keys = [key for filter, _ in unused if isinstance(filter, PathPattern) for key in filter.keys]
            joined = any(isinstance(key, str) and ("." in key or "/" in key) for key in keys)
            listing = ", ".join(f"{filter!r} ({task})" for filter, task in unused)
            raise PlacementError(
                f"no state is placed by {listing}: nothing has such a path, or an earlier filter "
                "takes it; correct the filter, move it up, or leave it out"
                + (". path takes one key at a time: path('a', 0), not path('a.0')" if joined else "")
            )

    def __repr__(self) -> str:
        shown = [
            f"{filter!r}: ({task if isinstance(task, Task) else repr(task)}, {spec})"
            for filter, (task, spec) in zip(self._filters, self._rules, strict=True)
        ]
        more = len(shown) - MOST_RULES
        return f"TaskSharding({{{', '.join(shown[:MOST_RULES])}{f', … {more} more' if more > 0 else ''}}})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TaskSharding)
            and self._filters == other._filters
            and self._rules == other._rules
        )

    def __hash__(self) -> int:
        return hash((self._filters, self._rules))

    def _first_match(self, path: Path, variable: Any) -> int | None:
        return next((i for i, matches in enumerate(self._predicates) if matches(path, variable)), None)

    def _nothing_matches(self, path: Path, variable: Any) -> str:
        tried = ", ".join(map(repr, self._filters)) or "none"
        help = f"{_suggest(path)!r} would match it, and a last `...` matches all that is left"
        if not path:
            help = (
                "It has no path: paths start at the Modules and States that a function takes or returns, and "
                "this is neither. Give it a sharding of its own, or match it by `...`"
            )
        return f"no filter places {_describe(path, variable)}. Filters, in order: {tried}. {help}"

    def _metadata_spec(self, path: Path, variable: Any, task: Task | Division) -> PartitionSpec:
        one = task.tasks[0] if isinstance(task, Division) else task  # their meshes are alike
        try:
            return logical_spec(variable, one, one.to_mesh()) or PartitionSpec()
        except ValueError as error:
            raise PlacementError(f"cannot place {_describe(path, variable)}: {error}") from None


def _normal_rule(filter: Any, rule: Any) -> tuple[Task | Division, PartitionSpec | None]:
    with_spec = isinstance(rule, tuple) and len(rule) == 2 and not isinstance(rule[1], Task)
    task, spec = rule if with_spec else (rule, None)
    if isinstance(task, list | tuple) and task and all(isinstance(one, Task) for one in task):
        task = Division(task) if len(task) > 1 else task[0]
    if not isinstance(task, Task | Division) or not (spec is None or isinstance(spec, PartitionSpec)):
        raise TypeError(
            f"a TaskSharding maps each filter to a Task, several Tasks or a Division, alone or with a "
            f"PartitionSpec, as in (task, P()); {filter!r} has {rule!r}"
        )
    if spec is not None and PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise TypeError(f"{filter!r} has {spec}: state is placed exactly, so no dimension is UNCONSTRAINED")
    return task, spec


def _predicate(filter: Any) -> Any:
    try:
        return nnx.filterlib.to_predicate(filter)
    except (TypeError, ValueError):  # Flax fails to format its own TypeError for some types
        raise TypeError(
            f"a key of a TaskSharding is an NNX filter (path(...), a Variable type, `...`, a function of "
            f"(path, value)), not {filter!r}"
        ) from None


def _check_spec(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, what: str) -> None:
    if len(spec) > len(shape):
        raise PlacementError(
            f"cannot place {what}: the spec has {len(spec)} entries and the shape {shape} has "
            f"{len(shape)} dimensions; give it a rule of its own, with a spec of at most {len(shape)} entries"
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise PlacementError(
                    f"cannot place {what}: its mesh has no axis {axis!r}; it has {_sizes(mesh.shape)}"
                )
            if axis in seen:
                raise PlacementError(f"cannot place {what}: the spec uses axis {axis!r} twice")
            seen.add(axis)
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % shards:
            sizes = _sizes({axis: mesh.shape[axis] for axis in axes})
            raise PlacementError(
                f"cannot place {what}: dimension {dim} has size {shape[dim]}, which {sizes} does not divide "
                f"evenly; use a multiple of {shards}, or leave that dimension unsharded"
            )


def _divided(
    division: Division, spec: PartitionSpec, shapes: Sequence[tuple[int, ...]], what: str
) -> NamedSharding:
    """The sharding of state that is divided.

    Raises:
      PlacementError: a dimension that is not there, or is too small; sizes that make another one; tasks that
        nothing can be divided between; or a spec that does not fit the pieces.
    """
    dim, count = division.dim, len(division.tasks)
    try:
        mesh = division.tasks[0].to_mesh()
        for shape in shapes:
            if dim >= len(shape):
                raise ValueError(
                    f"it has no dimension {dim} to divide between {count} tasks; give it a rule of its own, "
                    "with one task"
                )
            sizes = division.sizes_of(shape[dim])
            if sum(sizes) != shape[dim]:
                raise ValueError(
                    f"sizes= of {', '.join(map(str, sizes))} add up to {sum(sizes)}, and dimension {dim} "
                    f"has size {shape[dim]}"
                )
            if min(sizes) < 1:
                raise ValueError(f"dimension {dim} has size {shape[dim]}, too small for {count} tasks")
            for size in dict.fromkeys(sizes):
                _check_spec(spec, (*shape[:dim], size, *shape[dim + 1 :]), mesh, f"a piece of {what}")
        return division.sharding(spec, shapes[0][dim] if shapes else count)
    except PlacementError:  # of a piece
        raise
    except ValueError as error:
        raise PlacementError(f"cannot place {what}: {error}") from None


def _optimizer_spec(spec: PartitionSpec, parameter: Any, variable: nnx.Variable) -> PartitionSpec:
    """The spec of optimizer state whose parameter has `spec`; one for all arrays that the Variable holds."""
    shapes, own = _shapes(parameter), _shapes(variable)
    if shapes == own:
        return spec
    specs = {aligned_spec(spec, shape, mine) for shape in shapes for mine in own}
    return specs.pop() if len(specs) == 1 else PartitionSpec()


def _value(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _describe(path: Path, variable: Any) -> str:
    value = _value(variable)
    kind = f"{type(variable).__name__}, " if isinstance(variable, nnx.Variable) else ""
    arrays = [f"{_dtype(leaf)}{list(_shape(leaf))}" for leaf in jax.tree.leaves(value)]
    return f"{path_text(path) or 'the state'} ({kind}{', '.join(arrays)})"


def _shapes(variable: Any) -> list[tuple[int, ...]]:
    return [_shape(leaf) for leaf in jax.tree.leaves(_value(variable))]


def _shape(leaf: Any) -> tuple[int, ...]:
    return getattr(leaf, "shape", ())  # a Python number has none


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def _suggest(path: Path) -> PathPattern:
    """A pattern a user would write for `path`: up to the first index, else its first key."""
    index = next((i for i, key in enumerate(path) if isinstance(key, int)), 0)
    return PathPattern(tuple(path[: index + 1])) if path else PathPattern((...,))


def _sizes(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in shape.items())
