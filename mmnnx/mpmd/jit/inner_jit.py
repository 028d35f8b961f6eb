"""What stands in for the `jax.jit` inside `nnx.jit`: it has a function over arrays traced, split and run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.frontend.observe import Observer
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.ir.shardings import entering, mesh_of
from mmnnx.mpmd.jit.argument_types import (
    avals_of,
    explain,
    explain_auto,
    explicit_meshes,
    mesh_in_types,
    typed_mesh,
)
from mmnnx.mpmd.jit.cache_key import program_key, trace_key
from mmnnx.mpmd.jit.homes import put_home
from mmnnx.mpmd.jit.lowered import FlatLowered
from mmnnx.mpmd.jit.stages import FlatTraced, Trace, Variant, XlaOptions
from mmnnx.mpmd.jit.static_arguments import StaticArguments, restore
from mmnnx.mpmd.runtime.prepare import OUTERMOST, Run
from mmnnx.mpmd.runtime.references import put_on_device, take_back
from mmnnx.sharding.divided_array import PiecewiseSharding
from mmnnx.sharding.incompatible_devices import advise
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.task_scope import ignoring, tracing


@dataclasses.dataclass(frozen=True)
class FinishedCall:
    """A call that was just made: its flat inputs, what ran, and what the trace showed."""

    leaves: list[Any]
    run: Run
    record: Record


class FlatJit:
    """Stands where `nnx.jit` has a `jax.jit`.

    Args:
      pure: the function over pytrees of arrays that `nnx.jit` makes of the user's.
      observer: watches it while it is traced.
      static: which of its arguments are static.
      mesh: the MultiMesh that is current while it runs; None for the one that is so anyway.
      options: for `jax.jit`.
    """

    def __init__(
        self,
        pure: Callable[..., Any],
        observer: Observer,
        static: StaticArguments,
        mesh: MultiMesh | None,
        options: dict[str, Any],
    ):
        self.observer, self.static, self.mesh, self.options = observer, static, mesh, options
        self.observed = observer.around_flat(pure, lambda a, k: jax.tree.leaves(static.separate(a, k)[0]))
        self.nested = jax.jit(pure, **options)
        compiler_options = tuple(sorted(options["compiler_options"].items()))
        self.xla = XlaOptions(_device(options["device"], options["backend"]), compiler_options)
        self.traces: dict[Any, Trace] = {}
        self.variants: dict[Any, Variant] = {}
        self.finished = threading.local()  # .call is the last call of each thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic, static = self.static.separate(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if _compat.under_jit() or any(isinstance(x, jax.core.Tracer) for x in leaves):
            self._warn_of_shardings()
            try:
                with self.context():
                    return self.nested(*args, **kwargs)
            except Exception as error:
                advise(error, OUTERMOST)
                raise
        if ignoring.get() or _compat.jit_is_disabled():
            return self._on_one_device(args, kwargs)
        with self.context():
            key = program_key(tree, static, leaves)
            if key not in self.variants:
                self._trace(leaves, tree, static).split()
                key = program_key(tree, static, leaves)  # which tells what is registered
            variant = self.variants[key]
            run = variant.prepare(self.xla.compiler)
            results = run(leaves)
            self.finished.call = FinishedCall(leaves, run, variant.record)
            return jax.tree.unflatten(variant.out_tree, results)

    def _warn_of_shardings(self) -> None:
        for name in ("in_shardings", "out_shardings"):
            if getattr(self.observer, name) is not None:
                warnings.warn(
                    f"{name}= of mm.jit({self.observed.__name__}) does nothing inside another "
                    "transformation: give it to the outermost mm.jit, or use mm.with_sharding_constraint",
                    stacklevel=3,
                )

    def take_call(self) -> FinishedCall | None:
        """The call that this thread just made, once; None if it made none here."""
        return self.finished.__dict__.pop("call", None)

    def context(self) -> Any:
        """What makes the mesh of this function the current one."""
        return self.mesh if self.mesh is not None else contextlib.nullcontext()

    def trace(self, *args: Any, **kwargs: Any) -> FlatTraced:
        """The function traced for these arguments."""
        dynamic, static = self.static.separate(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        with self.context():
            return self._trace(leaves, tree, static)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered | FlatLowered:
        """The function traced and split for these arguments."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of its results."""
        return self.trace(*args, **kwargs).out_info

    def _on_one_device(self, args: tuple, kwargs: dict) -> Any:
        """Runs the function as it is on the first device; state then goes back to where it was."""
        dynamic, static = self.static.separate(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        self._check_one_process(leaves)
        here = put_on_device(leaves, jax.local_devices()[0])
        if _compat.jit_is_disabled():  # it may look at values, which a trace does not have
            with self.context():
                positional, named = restore(jax.tree.unflatten(tree, here), static)
                out = self.observed(*positional, **named)
            results, out_tree = jax.tree.flatten(out)
            record = self.observer.take_record()
        else:
            with self.context():
                traced = self._trace(leaves, tree, static)
            results, out_tree, record = traced.run_as_it_is()(here), traced.out_tree, traced.record
        take_back(leaves, here)
        for number, leaf in enumerate(record.results):
            old = leaves[leaf.updates] if leaf is not None and leaf.updates is not None else None
            if isinstance(old, jax.Array):
                results[number] = _taken_back(results[number], old)
        return jax.tree.unflatten(out_tree, results)

    def _check_one_process(self, leaves: Sequence[Any]) -> None:
        """Refuses arrays of which other processes have a part: one device cannot have them all."""
        for x in leaves:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                raise ValueError(
                    f"mm.jit({self.observed.__name__}) is given an array of shape {x.shape} on devices of "
                    "other processes. Under mm.ignore_transforms() and jax.disable_jit() a function runs on "
                    "one device of each process: debug it in one process, or give it copies made by mm.fetch"
                )

    def _trace(self, leaves: list[Any], tree: Any, static: Any) -> FlatTraced:
        """The function traced for arguments like these, if that has not been done."""
        key = trace_key(tree, static, leaves)
        if key not in self.traces:
            self.traces[key] = self._traced_with_types(leaves, tree, static)
        return FlatTraced(
            self.variants, self.traces[key], leaves, tree, static, current_multimesh(), self.xla
        )

    def _traced_with_types(self, leaves: list[Any], tree: Any, static: Any) -> Trace:
        """The function traced with shardings in types; where JAX refuses that, with Auto axes.

        Under `jax.set_mesh` it is as JAX says.
        """
        of_tasks: list[Mesh] = []
        restored = functools.partial(jax.tree.unflatten, tree)
        try:
            if ignoring.get():  # all is on one device
                return self._new_trace(*restore(restored(avals_of(leaves, typed=False)), static), None)
            with mesh_in_types(typed_mesh(leaves)):
                return self._new_trace(*restore(restored(avals_of(leaves)), static), of_tasks)
        except Exception as error:
            meshes: list[Any] = [*explicit_meshes(leaves), *of_tasks]
            if not meshes or not jax.sharding.get_abstract_mesh().empty:
                explain_auto(error)
                raise
            try:
                return self._new_trace(*restore(restored(avals_of(leaves, typed=False)), static), None)
            except Exception:
                explain(error, meshes)
            raise

    def _new_trace(self, args: Sequence[Any], kwargs: dict[str, Any], explicit: list[Mesh] | None) -> Trace:
        found = self._trace_once(args, kwargs, explicit)
        if found.record.needs_origins():
            self.observer.ask_for_origins()
            with contextlib.suppress(Exception):  # it may compare what is marked with what is not
                return self._trace_once(args, kwargs, explicit)
        return found

    def _trace_once(self, args: Sequence[Any], kwargs: dict[str, Any], explicit: list[Mesh] | None) -> Trace:
        done: list[jax.stages.Traced] = []

        # One of its own for each trace: JAX would give a jax.jit the same trace again where what differs is
        # not known to it. And JAX traces again what it forgets (jax.clear_caches), and under jax.debug_nans
        # runs again what gave a NaN, in a call that did not go through nnx.jit, which the function cannot be
        # called without: then its equations stand for it.
        @functools.wraps(self.observed)
        def fun(*args: Any, **kwargs: Any) -> Any:
            if not done or _compat.jit_is_disabled():
                return self.observed(*args, **kwargs)
            leaves = jax.tree.leaves(self.static.separate(args, kwargs)[0])
            return jax.tree.unflatten(done[0].out_tree, jex.jaxpr_as_fun(done[0].jaxpr)(*leaves))

        jitted = jax.jit(fun, **self.options)
        split = not ignoring.get()
        with tracing(split, explicit), gc_paused(), jax.disable_jit(False):
            traced = jitted.trace(*args, **kwargs)
        done.append(traced)
        return Trace(jitted, traced, self.observer.take_record())


def _taken_back(x: jax.Array, old: jax.Array) -> jax.Array:
    """A new value of state where the old one is; of another shape, as far as its sharding fits."""
    sharding = old.sharding
    if isinstance(sharding, PiecewiseSharding):
        return put_home(x, sharding) if x.shape == old.shape else x
    if isinstance(sharding, NamedSharding) and x.shape != old.shape:
        sharding = entering(x, mesh_of(sharding), sharding)
    return jax.device_put(x, sharding)


def _device(device: jax.Device | None, backend: str | None) -> jax.Device | None:
    """The device that `device=` or `backend=` of `jax.jit` means."""
    return jax.local_devices(backend=backend)[0] if backend is not None else device
