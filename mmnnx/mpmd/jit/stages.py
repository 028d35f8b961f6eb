"""The stages of a function on its way to run, as in `jax.stages`: traced, lowered and compiled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.ir.equations import scopes_in
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.jit.argument_types import mesh_in_types, typed_mesh
from mmnnx.mpmd.jit.cache_key import program_key, with_shardings
from mmnnx.mpmd.jit.static_arguments import restore
from mmnnx.mpmd.pipeline import Split, split
from mmnnx.mpmd.runtime.collective_order import in_collective_order
from mmnnx.mpmd.runtime.donated_arguments import check_shared
from mmnnx.mpmd.runtime.prepare import Run
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import find_task, ignoring


class Trace(NamedTuple):
    """One trace of a function: the `jax.jit` that made it, the trace, and what it showed."""

    jitted: Any
    traced: jax.stages.Traced
    record: Record


@dataclasses.dataclass(frozen=True)
class Variant:
    """A function split for arguments of certain types that live in certain places.

    Attributes:
      split: the split.
      as_it_is: runs the function as it is.
      out_tree: structure of its results.
      record: what the trace showed.
    """

    split: Split
    as_it_is: Run
    out_tree: Any
    record: Record

    def prepare(self) -> Run:
        """Compiles the program, once, and returns what runs it; the function as it is, where that will do."""
        return self.as_it_is if self.split.prepare is None else self.split.prepare()


class FlatTraced:
    """A traced function with the arrays it was traced for; what `jax.stages.Traced` has, it has.

    Args:
      variants: all that the function was split for, by `program_key`; learns this one.
      trace: the trace.
      leaves, tree: the dynamic arguments, flattened.
      static: the static ones.
      multimesh: the MultiMesh that was current.
    """

    def __init__(
        self,
        variants: dict[Any, Variant],
        trace: Trace,
        leaves: Sequence[Any],
        tree: Any,
        static: Any,
        multimesh: MultiMesh | None,
    ):
        self.jitted, self.traced, self.record = trace
        self.leaves, self.tree, self.static, self.multimesh = leaves, tree, static, multimesh
        self.variants = variants

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    def run_as_it_is(self) -> Run:
        """What runs the function as it is, where all that it touches is in one place."""
        jitted, tree, static = self.jitted, self.tree, self.static
        mesh = None if ignoring.get() else typed_mesh(self.leaves)
        donated, names = [a.donated for a in jax.tree.leaves(self.traced.args_info)], self.record.names()

        def run(leaves: Sequence[Any]) -> list[Any]:
            if True in donated:
                check_shared(leaves, donated, names)
            args, kwargs = restore(jax.tree.unflatten(tree, leaves), static)
            with mesh_in_types(mesh):
                return jax.tree.leaves(jitted(*args, **kwargs))

        return run

    def signature(self) -> list[tuple[str, str]]:
        """What a program depends on in each array: its name, its type and where it lives."""

        def where(x: Any) -> str:
            return f" on {x.sharding}" if is_committed(_compat.held(x)) else ""

        return [(str(leaf), f"{jax.typeof(x)}{where(x)}") for leaf, x in zip(self.record.inputs, self.leaves)]

    def tasks(self) -> list[Task]:
        """The tasks that have scopes in the function."""
        found = (find_task(scope, self.multimesh) for scope in scopes_in(self.traced.jaxpr))
        return [task for task in dict.fromkeys(found) if task is not None]

    def split(self) -> Split:
        """Splits the function, if that has not been done for arguments like these."""
        variants, inside = self.variants, current_multimesh() is self.multimesh
        with contextlib.nullcontext() if inside or self.multimesh is None else self.multimesh:
            key = program_key(self.tree, self.static, self.leaves)
            if key not in variants:
                with gc_paused():
                    found = split(self.traced, self.record, self.leaves, self.multimesh)
                key = program_key(self.tree, self.static, self.leaves)  # state may have been placed
                as_it_is = self.run_as_it_is()
                if found.prepare is None and found.program.calls:
                    as_it_is = in_collective_order(as_it_is, found.program.calls[0].mesh)
                variant = Variant(found, as_it_is, self.traced.out_tree, self.record)
                variants[key] = variant
                if found.next_shardings:
                    later = program_key(
                        self.tree, self.static, with_shardings(self.leaves, found.next_shardings)
                    )
                    variants.setdefault(later, variant)
            return variants[key].split

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
    """A function split into fragments, to be compiled."""

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
