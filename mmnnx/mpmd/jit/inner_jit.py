"""What stands where `nnx.jit` has a `jax.jit`: functions over arrays in pytrees, split and run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.compile.gc_pause import uncollected
from mmnnx.mpmd.frontend.observe import Observer, Record
from mmnnx.mpmd.ir.equations import scopes_in
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.jit.fast_path import surroundings
from mmnnx.mpmd.pipeline import Split, split
from mmnnx.mpmd.runtime.arguments import check_shared
from mmnnx.mpmd.runtime.collective_order import taking_turns
from mmnnx.mpmd.runtime.prepare import OUTERMOST, Run
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import find_task, ignoring, tracing


@dataclasses.dataclass(frozen=True)
class Static:
    """Which arguments are static, by position and by name."""

    numbers: frozenset[int]
    names: frozenset[str]

    def positions(self, args: Sequence[Any]) -> set[int]:
        return {n for n in range(len(args)) if n in self.numbers or n - len(args) in self.numbers}

    def divide(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """(dynamic arguments, static arguments) of a call."""
        fixed = self.positions(args)
        moving = (
            tuple(a for n, a in enumerate(args) if n not in fixed),
            {k: v for k, v in kwargs.items() if k not in self.names},
        )
        numbered = tuple((n, a) for n, a in enumerate(args) if n in fixed)
        named = tuple(sorted((k, v) for k, v in kwargs.items() if k in self.names))
        for name, value in (*numbered, *named):
            _check_hashable(name, value)
        # 1, 1.0 and True are equal, and not the same.
        return moving, (numbered, named, tuple(type(value) for _, value in (*numbered, *named)))


def _check_hashable(name: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"static argument {name} cannot be hashed: {reprlib.repr(value)}. The function is compiled anew "
            "for each of its values, which must be known again: give a tuple for a list, a frozen dataclass "
            "for a dict, and let no NNX object be static"
        ) from None


def static_arguments(fun: Callable, numbers: Any, names: Any) -> Static:
    """As in `jax.jit`: with one of the two given, the other follows from the signature."""
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
    names = (names,) if isinstance(names, str) else tuple(names or ())
    if bool(numbers) != bool(names):
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        if numbers:
            names = tuple(positional[n] for n in numbers if -len(positional) <= n < len(positional))
        else:
            numbers = tuple(positional.index(n) for n in names if n in positional)
    return Static(frozenset(numbers), frozenset(names))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that was just made: its flat inputs, what ran, and what the trace showed."""

    leaves: list[Any]
    run: Run
    record: Record


class FlatJit:
    """Stands where `nnx.jit` has a `jax.jit`: over arrays in pytrees, it splits and runs programs."""

    def __init__(
        self,
        pure: Callable[..., Any],
        observer: Observer,
        static: Static,
        mesh: MultiMesh | None,
        options: dict[str, Any],
    ):
        self.observer, self.static, self.mesh = observer, static, mesh
        self.options = options
        self.observed = observer.around_flat(pure, lambda a, k: jax.tree.leaves(static.divide(a, k)[0]))
        self.nested = jax.jit(pure, **options)
        self.traces: dict[Any, tuple[Any, jax.stages.Traced, Record]] = {}  # with the jax.jit that traced it
        self.splits: dict[Any, tuple[Split, Run, Any, Record]] = {}
        self.made = threading.local()  # .call is the last call of each thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        moving, held = self.static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(moving)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            try:
                return self.nested(*args, **kwargs)
            except ValueError as error:
                if "incompatible devices" in str(error):
                    error.add_note(OUTERMOST)
                raise
        if ignoring.get() or _compat.jit_is_disabled():
            return self._on_one_device(args, kwargs)
        with self.context():
            key = _key(tree, held, leaves)
            if key not in self.splits:
                self._trace(args, kwargs, leaves, tree, held).split()
                key = _key(tree, held, leaves)  # state may have been placed
            found, whole, out_tree, record = self.splits[key]
            run = found.prepare() if found.prepare else whole
            results = run(leaves)
            self.made.call = _Call(leaves, run, record)
            return jax.tree.unflatten(out_tree, results)

    def _on_one_device(self, args: tuple, kwargs: dict) -> Any:
        """Runs the function as it is on the first device; state then goes back to where it was."""
        traced = self.trace(*args, **kwargs)
        leaves = traced.leaves
        results = traced.whole()(jax.device_put(leaves, jax.devices()[0]))
        for number, leaf in enumerate(traced.record.results):
            old = leaves[leaf.updates] if leaf is not None and leaf.updates is not None else None
            if isinstance(old, jax.Array):
                results[number] = jax.device_put(results[number], old.sharding)
        return jax.tree.unflatten(traced.out_tree, results)

    def take_call(self) -> _Call | None:
        """The call that this thread just made, once; None if it made none here."""
        return self.made.__dict__.pop("call", None)

    def context(self) -> Any:
        """What makes the mesh of this function the current one."""
        return self.mesh if self.mesh is not None else contextlib.nullcontext()

    def _trace(self, args: tuple, kwargs: dict, leaves: list[Any], tree: Any, held: Any) -> FlatTraced:
        avals = tuple(_aval(x) for x in leaves)
        key = (tree, held, surroundings(), avals)
        if key not in self.traces:
            moving = jax.tree.unflatten(tree, avals)
            arguments = _restore(moving[0], held[0]), moving[1] | dict(held[1])
            self.traces[key] = self._traced(*arguments)
            if self.traces[key][-1].needs_origins():
                self.observer.ask_for_origins()
                with contextlib.suppress(Exception):  # it may compare what is marked with what is not
                    self.traces[key] = self._traced(*arguments)
        return FlatTraced(self, *self.traces[key], leaves, tree, held, current_multimesh())

    def _traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, jax.stages.Traced, Record]:
        # JAX would give one jax.jit the same trace again where what differs is not known to it.
        jitted = jax.jit(functools.partial(self.observed), **self.options)
        with tracing(split=not ignoring.get()), uncollected(), jax.disable_jit(False):
            traced = jitted.trace(*args, **kwargs)
        return jitted, traced, self.observer.take_record()

    def trace(self, *args: Any, **kwargs: Any) -> FlatTraced:
        moving, held = self.static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(moving)
        with self.context():
            return self._trace(args, kwargs, leaves, tree, held)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).out_info


class FlatTraced:
    """A traced function with the arrays it was traced for; what `jax.stages.Traced` has, it has."""

    def __init__(
        self,
        owner: FlatJit,
        jitted: Any,
        traced: jax.stages.Traced,
        record: Record,
        leaves: Sequence[Any],
        tree: Any,
        held: Any,
        multimesh: MultiMesh | None,
    ):
        self.owner, self.jitted, self.traced, self.record = owner, jitted, traced, record
        self.leaves, self.tree, self.held, self.multimesh = leaves, tree, held, multimesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    def whole(self) -> Run:
        """What runs the function as it is, where all that it touches is in one place."""
        jitted, tree, held = self.jitted, self.tree, self.held
        donated, names = [a.donated for a in jax.tree.leaves(self.traced.args_info)], self.record.names()

        def run(leaves: Sequence[Any]) -> list[Any]:
            if True in donated:
                check_shared(leaves, donated, names)
            moving = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(jitted(*_restore(moving[0], held[0]), **moving[1], **dict(held[1])))

        return run

    def signature(self) -> list[tuple[str, str]]:
        """What a program depends on in each array: its name, its type and where it lives."""

        def where(x: Any) -> str:
            return f" on {x.sharding}" if is_committed(x) else ""

        return [(str(leaf), f"{jax.typeof(x)}{where(x)}") for leaf, x in zip(self.record.inputs, self.leaves)]

    def tasks(self) -> list[Task]:
        """The tasks that have scopes in the function."""
        found = (find_task(scope, self.multimesh) for scope in scopes_in(self.traced.jaxpr))
        return [task for task in dict.fromkeys(found) if task is not None]

    def split(self) -> Split:
        """Cuts the function into fragments, if that has not been done for arguments like these."""
        splits, inside = self.owner.splits, current_multimesh() is self.multimesh
        with contextlib.nullcontext() if inside or self.multimesh is None else self.multimesh:
            key = _key(self.tree, self.held, self.leaves)
            if key not in splits:
                with uncollected():
                    found = split(self.traced, self.record, self.leaves, self.multimesh)
                key = _key(self.tree, self.held, self.leaves)  # state may have been placed
                whole = self.whole()
                if found.prepare is None and found.program.calls:
                    whole = taking_turns(whole, found.program.calls[0].mesh)
                entry = found, whole, self.traced.out_tree, self.record
                splits[key] = entry
                if found.settled:
                    splits.setdefault(_key(self.tree, self.held, _moved(self.leaves, found.settled)), entry)
            return splits[key][0]

    def input_shardings(self) -> Any:
        """Where the arguments would best live, as a tree (args, kwargs) like that of the dynamic ones.

        NNX objects become States.
        """
        shardings = iter(zip(self.split().input_shardings(), self.record.inputs))

        def give(path: Any, entry: Any) -> Any:
            if not isinstance(entry, _compat.NODE):
                return next(shardings)[0]
            found = [next(shardings) for _ in jax.tree.leaves(entry)]
            flat = [(leaf.path[len(path) - 1 :], s) for s, leaf in found if leaf is not None]
            if len(flat) == 1 and not flat[0][0]:
                return flat[0][1]  # a Variable by itself
            return nnx.from_flat_state(flat)

        tree = jax.tree.unflatten(self.tree, self.leaves)
        return jax.tree_util.tree_map_with_path(give, tree, is_leaf=lambda x: isinstance(x, _compat.NODE))

    def lower(self, **kwargs: Any) -> Any:
        found = self.split()
        if found.prepare is None:
            return self.traced.lower(**kwargs)
        return FlatLowered(self, found.program, found.prepare)


class FlatLowered:
    """A function cut into fragments, to be compiled."""

    def __init__(self, traced: FlatTraced, program: Program, prepare: Callable[[], Run]):
        self.traced, self.program, self.prepare = traced, program, prepare

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as it prints. It is several XLA programs, so a dialect has no meaning here."""
        return str(self.program)

    def compile(self, compiler_options: Any = None) -> FlatCompiled:
        if compiler_options:
            raise ValueError(
                "a program over several TaskMeshes takes no compiler_options yet: leave them out"
            )
        self.prepare()
        return FlatCompiled(self)

    def compiler_ir(self, dialect: str | None = None) -> None:
        """None: there is no one representation of several XLA programs."""

    def cost_analysis(self) -> None:
        """None: there is none of several XLA programs; `Program.profile` measures."""


class FlatCompiled:
    """A compiled program, to be called with arguments of the types and homes it was compiled for.

    As with what JAX compiles, static arguments are left out.
    """

    def __init__(self, lowered: FlatLowered):
        self.lowered = lowered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = self.lowered.traced
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != traced.tree:
            raise TypeError(
                f"{traced.fun_name} is called with other arguments than it was lowered for: another number "
                "of them, names where there were none, or another static attribute of a module. Static "
                "arguments are left out. Lower it for these, or call what mm.jit made, which compiles for "
                "what it is given"
            )
        return jax.tree.unflatten(traced.out_tree, self.lowered.prepare()(leaves))

    @property
    def input_shardings(self) -> Any:
        """Where the arguments would best live: a tree (args, kwargs)."""
        return self.lowered.traced.input_shardings()

    def memory_analysis(self) -> None:
        """None: there is none of several XLA programs; `Program.simulate` has the bytes on each mesh."""

    def runtime_executable(self) -> None:
        """None: there are several."""


def _restore(moving: tuple, held: tuple) -> list[Any]:
    """Puts static arguments back in their places."""
    args = list(moving)
    for n, a in held:
        args.insert(n, a)
    return args


def _key(tree: Any, held: Any, leaves: Sequence[Any]) -> Any:
    """What a program depends on in its arguments and around it."""
    return (tree, held, surroundings(), *map(_signature, leaves))


def _moved(leaves: Sequence[Any], places: dict[int, Any]) -> list[Any]:
    """What stands for arrays where some of them have been put somewhere else."""
    moved = list(leaves)
    for n, sharding in places.items():
        aval = _aval(leaves[n])
        moved[n] = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
    return moved


def _signature(x: Any) -> Any:
    """What a program depends on in an argument: its type and where it lives."""
    placed = isinstance(x, jax.ShapeDtypeStruct) or is_committed(x)
    return (_aval(x), x.sharding) if placed else _aval(x)


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    try:
        aval = jax.typeof(x)
    except TypeError as error:
        raise TypeError(f"{error}. What is no array is named by static_argnums or static_argnames") from None
    # Without its sharding, which is not the same in a process that has the array and in one that has not.
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
