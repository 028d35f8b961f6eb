"""Executables of fragments: compiled in a pool of threads, equal ones once, and kept while in use."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.compile.described_tpus import compiling_mesh, moved
from mmnnx.mpmd.compile.donation import Donations
from mmnnx.mpmd.compile.lower import Lowered, lower, lowering_key
from mmnnx.mpmd.compile.saved_executables import (
    CodeKey,
    Saved,
    find_saved,
    keep_in_cache,
    load_saved,
    serialized,
)
from mmnnx.mpmd.distributed.processes import is_described
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.shardings import spec_of

CompilerOptions = tuple[tuple[str, Any], ...]
"""What XLA is told beside the program: pairs (option, value), as `jax.stages.Lowered.compile` takes them."""


WHILE_COMPILING = "while compiling fragment "  # the start of a note on errors


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled fragment.

    Attributes:
      call: takes the fragment's inputs and returns its results, in orders of its own.
      inputs, outputs: which input (result) of the fragment comes where in them.
      code: what `call` is of, to stay in use with it.
    """

    call: jax.stages.Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    code: Code

    def result_specs(self, f: Fragment) -> list[PartitionSpec]:
        """How the results of the fragment are sharded, in its own order."""
        results = dict(zip(self.outputs, jax.tree.leaves(self.call.output_shardings)))
        # What was compiled for devices that are only described may be shared, and is not loaded for others.
        is_own = self.call is not self.code.compiled or self.code.mesh == f.mesh
        mesh = f.mesh if is_own else self.code.mesh
        return [spec_of(results[n], mesh, v.aval.shape) for n, v in enumerate(f.outvars)]


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """What was compiled for one mesh, and loaded for others.

    Attributes:
      mesh: the one.
      compiled: the executable for it.
      key: equal for what is compiled to the same.
      saved: what it was loaded from, by `find_saved`.
      seconds: what it took to compile; None if it was not compiled here. What JAX read from its own cache
        cannot be loaded for others: saved once more, it lacks its machine code.
      loaded: the same for others.
    """

    mesh: Mesh
    compiled: jax.stages.Compiled
    key: CodeKey
    saved: Saved | None = None
    seconds: float | None = None
    loaded: dict[Mesh, jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def on(self, mesh: Mesh, compile_there: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """The same for a mesh; compiled there if it cannot be loaded."""
        if mesh == self.mesh:
            return self.compiled
        if mesh not in self.loaded:
            if is_described(mesh.devices.flat[0]):
                return self.compiled  # it is looked at, and never runs
            results = jax.tree.leaves(self.compiled.output_shardings)
            named = all(isinstance(s, NamedSharding) for s in results)  # or nothing says how to move it
            self.loaded[mesh] = (self._load(mesh) if named else None) or compile_there()
        return self.loaded[mesh]

    def _load(self, mesh: Mesh) -> jax.stages.Compiled | None:
        """Its code, loaded for another mesh."""
        if self.saved is not None:
            return load_saved(self.saved, self.compiled, mesh)
        if self.seconds is None:
            return None
        loaded = load_saved(self._serialized, self.compiled, mesh)
        if loaded is not None and not self.loaded:
            keep_in_cache(self.key, mesh, self._serialized, self.seconds)
        return loaded

    @functools.cached_property
    def _serialized(self) -> Saved:
        return serialized(self.compiled, self.mesh)


# What programs in use have, by key. A function is partitioned anew when arguments come from elsewhere, as
# counters do after their first step, and most of its fragments are what they were.
_in_use: WeakValueDictionary[Any, Code] = WeakValueDictionary()


class CompilePool:
    """Compiles in a pool of threads, and what is equal but for its devices once.

    Args:
      threads: the pool.
      options: for XLA.

    Attributes:
      waiting: the fragments that were begun and have not been handed out.
    """

    def __init__(self, threads: ThreadPoolExecutor, options: CompilerOptions = ()):
        self.waiting: dict[Fragment, tuple[Lowered, Callable[[], Lowered]]] = {}
        self._threads, self._options = threads, options
        config: Any = jax.config  # mypy does not know its attributes
        self._is_logged = config.jax_log_compiles  # which the threads do not know
        self._lowered: dict[Any, Lowered] = {}
        self._code: dict[Any, Future[Code]] = {}

    def begin(
        self,
        f: Fragment,
        label: str,
        shardings: Sequence[NamedSharding],
        fixed: Mapping[PlacedVar, NamedSharding],
        donations: Donations,
    ) -> None:
        """Lowers a fragment, unless an equal one was, and begins to compile it, unless that is known.

        Args:
          f: the fragment.
          label: what errors call it.
          shardings: of its inputs.
          fixed: shardings that are decided.
          donations: its inputs whose buffers results take over.
        """
        mesh = compiling_mesh(f.mesh)
        lower_it = functools.partial(lower, *moved(f, shardings, fixed, mesh), donations)
        key = lowering_key(f, shardings, fixed, donations)
        lowered = self._lowered.get(key) or lower_it()
        if key is not None and lowered.is_shareable:
            self._lowered[key] = lowered
        self.waiting[f] = lowered, lower_it
        code_key = lowered.key, self._options
        if code_key not in self._code:
            known = _in_use.get(code_key)
            compiling = lambda: self._compile_first(lowered, label, mesh)
            self._code[code_key] = self._threads.submit(compiling) if known is None else _finished(known)

    def completed(self) -> Iterator[tuple[Fragment, Executable]]:
        """The fragments that are compiled, as soon as there are any; none if none was begun."""
        futures = {f: self._code[low.key, self._options] for f, (low, _) in self.waiting.items()}
        done, _ = wait(futures.values(), None, FIRST_COMPLETED)
        for f, future in futures.items():
            if future in done:
                lowered, lower_it = self.waiting.pop(f)
                code = _in_use[lowered.key, self._options] = future.result()
                call = code.on(f.mesh, lambda: compile_lowered(lower_it(), self._options))  # noqa: B023
                yield f, Executable(call, lowered.inputs, lowered.outputs, code)

    def _compile_first(self, lowered: Lowered, label: str, mesh: Mesh) -> Code:
        key = lowered.key, self._options
        if (saved := find_saved(key, mesh)) is not None:
            compiled = load_saved(saved, lowered.stage, mesh)
            if compiled is not None:
                return Code(mesh, compiled, key, saved)
        start, hits = time.perf_counter(), _compat.cache_hits()
        try:
            with jax.log_compiles(self._is_logged):
                compiled = compile_lowered(lowered, self._options)
            seconds = time.perf_counter() - start if _compat.cache_hits() == hits else None
            return Code(mesh, compiled, key, seconds=seconds)
        except Exception as error:
            error.add_note(f"{WHILE_COMPILING}{label}")
            raise


def compile_lowered(lowered: Lowered, options: CompilerOptions) -> jax.stages.Compiled:
    """Where XLA compiles a fragment."""
    return lowered.stage.compile(dict(options) or None)


def _finished(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
