"""`mm.jit`: `nnx.jit` over several TaskMeshes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.lift import Observer, Record
from mmnnx.mpmd.program import Program
from mmnnx.mpmd.repeat import Shortcut, learn, take_apart
from mmnnx.mpmd.split import Run, Split, split
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.task import splitting

_ignoring: contextvars.ContextVar[bool] = contextvars.ContextVar("mmnnx_ignore", default=False)


@contextlib.contextmanager
def ignore_transforms(ignore: bool = True) -> Iterator[None]:
    """Makes `mm.jit` plain `nnx.jit` on one device, for debugging.

    Example:
      >>> with mm.ignore_transforms():
      ...     loss = train_step(model, optimizer, batch)
    """
    token = _ignoring.set(ignore)
    try:
        yield
    finally:
        _ignoring.reset(token)


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    mesh: MultiMesh | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function over NNX objects into one program for each TaskMesh that it touches.

    It behaves as `nnx.jit` does. State is placed: computation follows the state that lives on a mesh (or is
    put there by `in_shardings` or `out_shardings`), and an explicit task scope (`mm.task`) overrides. A
    function that touches one mesh runs as one XLA program.

    Args:
      fun: the function; without it, a decorator is returned.
      in_shardings, out_shardings: `TaskSharding`, `nnx.StateSharding`, `jax.sharding.Sharding`, PartitionSpec
        or None, or prefix trees of them, over the positional arguments and over the result.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused: as in `jax.jit`.
      mesh: the MultiMesh to divide. Default: the current one when called.
      graph, graph_updates: as in `nnx.jit`.

    Returns:
      An object to be called as `fun` is. It has the methods `eval_shape`, `trace` and `lower` of `nnx.jit`,
      and `program(*args)`, which returns the `Program` that a call with these arguments runs.

    Raises:
      PlacementError: when called, if state cannot be placed as asked.
      ValueError: when called, for a `cond` or `while` across tasks, or an argument that was donated before.

    Example:
      >>> @mm.jit
      ... def train_step(model, optimizer, batch):
      ...     loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
      ...     optimizer.update(model, grads)
      ...     return loss
    """
    options = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "mesh": mesh,
        "graph": graph,
        "graph_updates": graph_updates,
    }
    if fun is None:
        return functools.partial(jit, **options)
    return Jit(fun, **options)


class Jit:
    """A function made by `mm.jit`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        in_shardings: Any,
        out_shardings: Any,
        mesh: MultiMesh | None,
        graph: bool | None,
        graph_updates: bool | None,
        **options: Any,
    ):
        if inspect.ismethod(fun) and isinstance(fun.__self__, nnx.Module):
            raise ValueError(
                f"mm.jit of the bound method {fun.__qualname__}: decorate the method in its class, "
                f"or give mm.jit({fun.__qualname__}) and pass the instance as first argument"
            )
        functools.update_wrapper(self, fun)
        names = _static_names(fun, options["static_argnums"], options["static_argnames"])
        observer = Observer(in_shardings, out_shardings, names.positions)
        self._lifted = nnx.jit(observer.around_user(fun), graph=graph, graph_updates=graph_updates, **options)
        self._flat = FlatJit(_compat.pure_function(self._lifted), observer, names, mesh, options)
        _compat.replace_pure_function(self._lifted, self._flat)
        self._in_graph_mode = _compat.in_graph_mode(self._lifted)
        self._shortcuts: dict[Any, Shortcut] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._in_graph_mode or _ignoring.get():
            return self._lifted(*args, **kwargs)
        with self._flat.context():
            arguments = take_apart(*self._flat.static.divide(args, kwargs))
            if arguments is not None and (shortcut := self._shortcuts.get(arguments.key)) is not None:
                return shortcut(arguments)
            out = self._lifted(*args, **kwargs)
            call, self._flat.last = self._flat.last, None
            if arguments is not None and call is not None and call.record.out_tree is not None:
                updates = [leaf.updates if leaf is not None else None for leaf in call.record.results]
                shortcut = learn(arguments, call.leaves, updates, call.run, call.record.out_tree)
                if shortcut is not None:
                    self._shortcuts[arguments.key] = shortcut
            return out

    def __get__(self, obj: Any, objtype: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes and dtypes, without computing it. See `jax.eval_shape`."""
        return self._lifted.eval_shape(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The function traced for these arguments, to be lowered and compiled. See `jax.stages.Traced`."""
        return self._lifted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The function lowered for these arguments, to be compiled. See `jax.stages.Lowered`."""
        return self._lifted.lower(*args, **kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs: to print, verify, simulate and draw.

        Nothing is compiled or run, and the arguments are not changed.
        """
        return _compat.inner_traced(self.trace(*args, **kwargs)).split().program


@dataclasses.dataclass(frozen=True)
class _Static:
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
        held = (
            tuple((n, a) for n, a in enumerate(args) if n in fixed),
            tuple(sorted((k, v) for k, v in kwargs.items() if k in self.names)),
        )
        return moving, held


def _static_names(fun: Callable, numbers: Any, names: Any) -> _Static:
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
    return _Static(frozenset(numbers), frozenset(names))


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
        static: _Static,
        mesh: MultiMesh | None,
        options: dict[str, Any],
    ):
        self.observer, self.static, self.mesh = observer, static, mesh
        self.nested = jax.jit(pure, **options)
        self.whole = jax.jit(
            observer.around_flat(pure, lambda a, k: jax.tree.leaves(static.divide(a, k)[0])), **options
        )
        self.traces: dict[Any, tuple[jax.stages.Traced, Record]] = {}
        self.splits: dict[Any, tuple[Split, Any, Record]] = {}
        self.last: _Call | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        moving, held = self.static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(moving)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self.nested(*args, **kwargs)
        if _ignoring.get():
            one = jax.tree.unflatten(tree, jax.device_put(leaves, jax.devices()[0]))
            return self.nested(*_restore(one[0], held[0]), **one[1], **dict(held[1]))
        with self.context():
            key = (tree, held, current_multimesh(), *map(_signature, leaves))
            if key not in self.splits:
                traced = self._trace(args, kwargs, leaves, tree, held)
                self.splits[key] = (traced.split(), traced.out_tree, traced.record)
            found, out_tree, record = self.splits[key]
            if found.prepare is None:
                return self.whole(*args, **kwargs)
            run = found.prepare()
            self.last = _Call(leaves, run, record)
            return jax.tree.unflatten(out_tree, run(leaves))

    def context(self) -> Any:
        """What makes the mesh of this function the current one."""
        return self.mesh if self.mesh is not None else contextlib.nullcontext()

    def _trace(self, args: tuple, kwargs: dict, leaves: list[Any], tree: Any, held: Any) -> FlatTraced:
        avals = tuple(_aval(x) for x in leaves)
        key = (tree, held, current_multimesh(), avals)
        if key not in self.traces:
            moving = jax.tree.unflatten(tree, avals)
            token = splitting.set(True)
            try:
                traced = self.whole.trace(*_restore(moving[0], held[0]), **moving[1], **dict(held[1]))
            finally:
                splitting.reset(token)
            self.traces[key] = (traced, self.observer.record)
        traced, record = self.traces[key]
        return FlatTraced(self, traced, record, leaves, current_multimesh())

    def trace(self, *args: Any, **kwargs: Any) -> FlatTraced:
        moving, held = self.static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(moving)
        with self.context():
            return self._trace(args, kwargs, leaves, tree, held)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.nested.eval_shape(*args, **kwargs)


class FlatTraced:
    """A traced function with the arrays it was traced for; what `jax.stages.Traced` has, it has."""

    def __init__(
        self,
        owner: FlatJit,
        traced: jax.stages.Traced,
        record: Record,
        leaves: Sequence[Any],
        multimesh: MultiMesh | None,
    ):
        self.owner, self.traced, self.record = owner, traced, record
        self.leaves, self.multimesh = leaves, multimesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    def split(self) -> Split:
        """Cuts the function into fragments."""
        return split(self.traced, self.record, self.leaves, self.multimesh)

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

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        return str(self.program)

    def compile(self, compiler_options: Any = None) -> FlatCompiled:
        self.prepare()
        return FlatCompiled(self)


class FlatCompiled:
    """A compiled program, to be called with arguments of the types and homes it was compiled for."""

    def __init__(self, lowered: FlatLowered):
        self.lowered = lowered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves(self.lowered.traced.owner.static.divide(args, kwargs)[0])
        return jax.tree.unflatten(self.lowered.traced.out_tree, self.lowered.prepare()(leaves))


def _restore(moving: tuple, held: tuple) -> list[Any]:
    """Puts static arguments back in their places."""
    args = list(moving)
    for n, a in held:
        args.insert(n, a)
    return args


def _signature(x: Any) -> Any:
    """What a program depends on in an argument: its type and where it lives."""
    if isinstance(x, jax.Array):
        return (x.aval, x.sharding if x.committed else None)
    return _aval(x)


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
