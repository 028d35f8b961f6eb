"""`mm.jit`: `nnx.jit` over several TaskMeshes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx import jit as nnx_jit  # by name: a program may set `nnx.jit = mm.jit`

from mmnnx import _compat
from mmnnx.mpmd.frontend.observe import Observer
from mmnnx.mpmd.frontend.references import hijax_refused
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Profile
from mmnnx.mpmd.jit.arguments import Arguments, variables_in
from mmnnx.mpmd.jit.check_shardings import check_shardings
from mmnnx.mpmd.jit.fast_path import FastPath, FastPaths, fast_path
from mmnnx.mpmd.jit.homes import bring_home, note_homes
from mmnnx.mpmd.jit.inner_jit import FlatJit
from mmnnx.mpmd.jit.stage_objects import Lowered, Traced
from mmnnx.mpmd.jit.stages import FlatTraced
from mmnnx.mpmd.jit.static_arguments import static_arguments
from mmnnx.mpmd.runtime.prepare import OUTERMOST
from mmnnx.mpmd.runtime.profile import measuring
from mmnnx.printable import first_few
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import ignoring

P = ParamSpec("P")
WithoutSelf = ParamSpec("WithoutSelf")
R = TypeVar("R")


class _Options(TypedDict, total=False):
    """The options of `jit`, for type checkers."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: jax.Device | None
    backend: str | None
    inline: bool
    compiler_options: Mapping[str, Any] | None
    mesh: MultiMesh | None
    graph: bool | None
    graph_updates: bool | None


@overload
def jit(fun: Callable[P, R], **options: Unpack[_Options]) -> Jit[P, R]: ...


@overload
def jit(fun: None = None, **options: Unpack[_Options]) -> Callable[[Callable[P, R]], Jit[P, R]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: jax.Device | None = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    mesh: MultiMesh | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function over NNX objects into fragments, XLA programs of one TaskMesh each.

    It behaves as `nnx.jit` does. State is placed: computation follows the state that lives on a mesh (or is
    put there by `in_shardings` or `out_shardings`), and an explicit task scope (`mm.task`) overrides. A
    function that touches one mesh runs as one XLA program.

    Args:
      fun: the function; without it, a decorator is returned.
      in_shardings, out_shardings: `TaskSharding`, `nnx.StateSharding`, `jax.sharding.Sharding`, PartitionSpec
        or None, or prefix trees of them, over the positional arguments and over the result.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, inline: as in `jax.jit`.
      device, backend: as in `jax.jit`, for a function of one device. Inside another `mm.jit` of several
        submeshes they have no effect.
      compiler_options: options for XLA, as in `jax.jit`; they hold for each of the programs.
      mesh: the MultiMesh to partition the function over. Default: the current one when called.
      graph, graph_updates: as in `nnx.jit`.

    Returns:
      An object to be called as `fun` is. It has the methods `eval_shape`, `trace` and `lower` of `nnx.jit`,
      and `program(*args)`, which returns the `Program` that a call with these arguments runs.

    Raises:
      PlacementError: when called, if state cannot be placed as asked.
      TypeError: for what is no function, MultiMesh or sharding (a Task, or rules without TaskSharding).
      ValueError: for a prefix that the mode does not take, and for a bound method; when called, for two
        shardings of one Variable, a `while` across tasks inside of `mm.microbatch`, an argument that was
        donated before, or `device` where state, a sharding or a task says where the function runs.

    Example:
      >>> @mm.jit
      ... def train_step(model, optimizer, batch):
      ...     loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
      ...     optimizer.update(model, grads)
      ...     return loss
    """
    graph, graph_updates = _compat.graph_modes(graph, graph_updates)
    options = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "device": device,
        "backend": backend,
        "inline": inline,
        "compiler_options": compiler_options,
        "mesh": mesh,
        "graph": graph,
        "graph_updates": graph_updates,
    }
    if fun is None:
        return functools.partial(jit, **options)
    return Jit(fun, **options)


class Jit(Generic[P, R]):
    """A function made by `mm.jit`."""

    def __init__(
        self,
        fun: Callable[P, R],
        *,
        in_shardings: Any,
        out_shardings: Any,
        mesh: MultiMesh | None,
        graph: bool,
        graph_updates: bool,
        device: jax.Device | None,
        backend: str | None,
        compiler_options: Mapping[str, Any] | None,
        **options: Any,
    ):
        if not callable(fun):
            raise TypeError(f"mm.jit compiles a function, not {fun!r}")
        if not isinstance(mesh, MultiMesh | None):
            raise TypeError(f"mesh= is a MultiMesh, not {mesh!r}")
        check_shardings("in_shardings", in_shardings, graph, graph_updates)
        check_shardings("out_shardings", out_shardings, graph, graph_updates)
        _check_device(device, backend, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh)
        method: Any = fun
        while isinstance(method, functools.partial):
            method = method.func
        if inspect.ismethod(method) and isinstance(method.__self__, nnx.Module):
            raise ValueError(
                f"mm.jit of the bound method {method.__qualname__}: decorate the method in its class, "
                f"or give mm.jit({method.__qualname__}) and pass the instance as first argument"
            )
        functools.update_wrapper(self, fun)
        static = static_arguments(fun, options["static_argnums"], options["static_argnames"])
        observer = Observer(in_shardings, out_shardings, static.positions)
        watched = observer.around_user(fun)
        self._nnx_jit = nnx_jit(watched, graph=graph, graph_updates=graph_updates, **options)
        # What nnx.jit does not have, or hands to a jax.jit that refuses it, is for the one inside alone.
        options |= {"device": device, "backend": backend, "compiler_options": dict(compiler_options or {})}
        self._inner = FlatJit(_compat.pure_function(self._nnx_jit), observer, static, mesh, options)
        _compat.replace_pure_function(self._nnx_jit, self._inner)
        self._updates_graphs = graph and graph_updates
        self._fast_paths = FastPaths(graph)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        as_it_is = ignoring.get() or _compat.jit_is_disabled()
        if as_it_is or _compat.in_cached_partial():
            try:
                with hijax_refused((args, kwargs)):
                    return self._nnx_jit(*args, **kwargs)
            finally:
                self._inner.take_call()  # or it would keep the arguments alive
        if _compat.under_jit():  # part of what is traced, whatever its arguments are
            if self._updates_graphs:
                self._check_trace(variables_in(args, kwargs))
            with hijax_refused((args, kwargs)):
                return self._nnx_jit(*args, **kwargs)
        with self._inner.context():
            arguments, path = self._find(args, kwargs)
            if path is None or path.homeless:
                variables = variables_in(args, kwargs) if arguments is None else arguments.variables
                if self._updates_graphs:
                    # To ask each takes longer than all the rest of a call like an earlier one.
                    self._check_trace(variables if path is None else variables[:1])
                if bring_home(variables):
                    arguments, path = self._find(args, kwargs)
            if arguments is not None and path is not None:
                return path(arguments)
        try:
            with hijax_refused((args, kwargs)):
                out = self._nnx_jit(*args, **kwargs)
        finally:
            call = self._inner.take_call()
        if call is None:
            return out
        note_homes(variables_in(args, kwargs, out))
        if arguments is not None and call.record.out_tree is not None:
            updates = [leaf.updates if leaf is not None else None for leaf in call.record.results]
            out_tree, out_first = call.record.out_tree, not self._updates_graphs
            new = fast_path(arguments, call.leaves, updates, call.run, out_tree, out_first)
            if new is not None:
                self._fast_paths.add(arguments, new)
        return out

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments | None, FastPath | None]:
        """The arguments of a call, taken apart, and how to repeat one that had arguments like these."""
        return self._fast_paths.find(*self._inner.static.separate(args, kwargs))

    def _check_trace(self, variables: Iterable[nnx.Variable]) -> None:
        """Refuses what Flax would begin to write to, lose, and then refuse."""
        for v in variables:
            if not _compat.can_update(v):
                raise TraceContextError(
                    f"{self!r} is given a {type(v).__name__} from outside of the transformation that it is "
                    f"called in, and could not update it. {OUTERMOST}"
                )

    def __repr__(self) -> str:
        return f"mm.jit({getattr(self, '__qualname__', 'function')})"

    def __deepcopy__(self, memo: Any) -> Jit[P, R]:
        return self  # as of a function

    @overload
    def __get__(self, obj: None, objtype: type | None = None) -> Jit[P, R]: ...

    @overload
    def __get__(
        self: Jit[Concatenate[Any, WithoutSelf], R], obj: object, objtype: type | None = None
    ) -> Callable[WithoutSelf, R]: ...

    def __get__(self, obj: Any, objtype: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def eval_shape(self, *args: Any, **kwargs: Any) -> R:
        """The result's shapes and dtypes, without computing it. See `jax.eval_shape`."""
        with hijax_refused((args, kwargs)):
            return self._nnx_jit.eval_shape(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The function traced for these arguments, to be lowered and compiled. See `jax.stages.Traced`."""
        return Traced(self._trace(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The function lowered for these arguments, to be compiled. See `jax.stages.Lowered`."""
        with hijax_refused((args, kwargs)):
            bring_home(variables_in(args, kwargs))
            return Lowered(self._nnx_jit.lower(*args, **kwargs))

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs: to print, verify, simulate and draw.

        Nothing is compiled or run, and the arguments keep their values. State that was updated from the host
        goes back to where it lived, as in a call.
        """
        traced = self._flat_traced(*args, **kwargs)
        return dataclasses.replace(
            traced.split().program, run=functools.partial(self._profile, traced.signature())
        )

    def tasks(self, *args: Any, **kwargs: Any) -> list[Task]:
        """The tasks whose scopes, registered ones included, a call with these arguments goes through.

        Example:
          >>> double = mm.task(lambda x: 2 * x, "double")
          >>> [task.name for task in mm.jit(lambda x: double(x) + 1).tasks(3.0)]
          ['double']
        """
        return self._flat_traced(*args, **kwargs).tasks()

    def input_shardings(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Where the arguments would best live, derived from what the function does with them.

        Each is on the TaskMesh that reads it first, sharded as the constraints inside imply; what is placed
        already stays, and scalars are replicated on the whole MultiMesh. Nothing is run: arguments may be
        `jax.ShapeDtypeStruct`, and modules those of `nnx.eval_shape`.

        Returns:
          (args, kwargs) of NamedShardings in the structure of the arguments without the static ones; for an
          NNX object an `nnx.State` of them, which `nnx.StateSharding` takes.

        Example:
          >>> f = mm.task(lambda w, x: mm.with_sharding_constraint(x @ w, P(None, "model")), "dense")
          >>> (w, x), _ = mm.jit(f, mesh=mesh).input_shardings(jnp.ones((2, 8)), jnp.ones((4, 2)))
          >>> w.spec
          P(None, 'model')
        """
        return self._flat_traced(*args, **kwargs).input_shardings()

    def _flat_traced(self, *args: Any, **kwargs: Any) -> FlatTraced:
        return _compat.inner_stage(self._trace(args, kwargs))

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `nnx.jit` returns: Flax's stage object around ours."""
        with hijax_refused((args, kwargs)):
            bring_home(variables_in(args, kwargs))
            return self._nnx_jit.trace(*args, **kwargs)

    def _profile(self, expected: list[tuple[str, str]], *args: Any, **kwargs: Any) -> Profile:
        found = self._flat_traced(*args, **kwargs).signature()
        if found != expected:
            differ = [
                f"argument {a} is {now}, not {b}" for (a, now), (_, b) in zip(found, expected) if now != b
            ]
            raise ValueError(
                "profile: these arguments are not like those that the program was made for: "
                + (first_few(differ, 3, "; ") or f"{len(found)} arrays, not {len(expected)}")
            )
        if jax.process_count() > 1:
            raise ValueError("a program is profiled in one process: run the script without mm.initialize")
        with measuring() as profiles:
            self(*args, **kwargs)
        if not profiles:
            raise ValueError(
                "all of this function is on one TaskMesh, and runs as one XLA program: there is nothing to "
                "take apart. jax.profiler shows what is inside"
            )
        return profiles[-1]


def _check_device(device: Any, backend: Any, **others: Any) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given and (device is not None or backend is not None):
        name = "device" if device is not None else "backend"
        raise ValueError(
            f"mm.jit has {name}= next to {'= and '.join(given)}=, which says where the function runs. Leave "
            f"{name}= out: for one device, in_shardings= and out_shardings= take a "
            "jax.sharding.SingleDeviceSharding"
        )
