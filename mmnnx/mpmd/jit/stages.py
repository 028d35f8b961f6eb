"""A traced function, to be split, and what is known of it once it was."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.compile.gc_pause import gc_paused
from mmnnx.mpmd.frontend.function import register_tasks
from mmnnx.mpmd.frontend.graph import is_node
from mmnnx.mpmd.frontend.over_arrays import OverArrays, over_arrays
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.ir.equations import scopes_in
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.jit.argument_types import mesh_in_types, typed_mesh
from mmnnx.mpmd.jit.cache_key import program_key, with_shardings
from mmnnx.mpmd.jit.lowered import FlatLowered
from mmnnx.mpmd.jit.static_arguments import restore
from mmnnx.mpmd.pipeline import Split, split
from mmnnx.mpmd.runtime.collective_order import in_collective_order
from mmnnx.mpmd.runtime.donated_arguments import check_shared
from mmnnx.mpmd.runtime.prepare import Run, refuse_described
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.registered_tasks import registrations, registrations_for
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import find_task, ignoring


class XlaOptions(NamedTuple):
    """What `mm.jit` was told of XLA: the device that device= or backend= means, and compiler_options."""

    device: jax.Device | None
    compiler: CompilerOptions


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
      name: of the function.
    """

    split: Split
    as_it_is: Run
    out_tree: Any
    record: Record
    name: str

    def prepare(self, options: CompilerOptions) -> Run:
        """Compiles the program, once, and returns what runs it; the function as it is, where that will do.

        Raises:
          ValueError: if its devices are only described.
        """
        if self.split.prepare is None:
            return self.as_it_is
        if self.split.is_described:
            refuse_described(self.name, self.split.program)
        return self.split.prepare(options)


class FlatTraced:
    """A traced function with the arrays it was traced for; what `jax.stages.Traced` has, it has.

    Args:
      variants: all that the function was split for, by `program_key`; learns this one.
      trace: the trace.
      leaves, tree: the dynamic arguments, flattened.
      static: the static ones.
      multimesh: the MultiMesh that was current.
      xla: options for XLA.
    """

    def __init__(
        self,
        variants: dict[Any, Variant],
        trace: Trace,
        leaves: Sequence[Any],
        tree: Any,
        static: Any,
        multimesh: MultiMesh | None,
        xla: XlaOptions,
    ):
        self.jitted, self.traced, self.record = trace
        self.leaves, self.tree, self.static, self.multimesh = leaves, tree, static, multimesh
        self.variants, self.xla = variants, xla

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
                function = over_arrays(self.traced, self.record)
                register_tasks(*function)
                key = program_key(self.tree, self.static, self.leaves)  # which tells what is registered
            if key not in variants:
                variants[key] = self._own_variant(*function)
            return variants[key].split

    def _own_variant(self, traced: OverArrays, record: Record) -> Variant:
        """The function split for these arguments, whatever state there is beside theirs."""
        own = registrations_for(leaf.within for leaf in record.inputs if leaf is not None)
        key = program_key(self.tree, self.static, self.leaves, own)
        if key not in self.variants:
            with gc_paused():
                found = split(traced, record, self.leaves, self.multimesh, self.xla.device)
            as_it_is = self.run_as_it_is()
            if found.prepare is None and found.program.calls:
                as_it_is = in_collective_order(as_it_is, found.program.calls[0].mesh)
            variant = Variant(found, as_it_is, self.traced.out_tree, self.record, self.traced.fun_name)
            self.variants[key] = variant
            if found.next_shardings:
                moved = with_shardings(self.leaves, found.next_shardings)
                for registered in (own, registrations()):
                    later = program_key(self.tree, self.static, moved, registered)
                    self.variants.setdefault(later, variant)
        return self.variants[key]

    def input_shardings(self) -> Any:
        """Where the arguments would best live, as `for_arguments` arranges them."""
        return self.for_arguments(self.split().input_shardings())

    def for_arguments(self, values: Sequence[Any]) -> Any:
        """Something for each flat argument, as a tree (args, kwargs) like that of the dynamic ones.

        NNX objects become States.
        """
        given = iter(zip(values, self.record.inputs))

        def give(path: Any, entry: Any) -> Any:
            if not _is_node(entry):
                return next(given)[0]
            found = [next(given) for _ in jax.tree.leaves(entry)]
            flat = [(leaf.path[len(path) - 1 :], s) for s, leaf in found if leaf is not None]
            if len(flat) == 1 and not flat[0][0]:
                return flat[0][1]  # a Variable by itself
            return nnx.from_flat_state(flat)

        tree = jax.tree.unflatten(self.tree, self.leaves)
        return jax.tree_util.tree_map_with_path(give, tree, is_leaf=_is_node)

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered | FlatLowered:
        """What is to be compiled: the function itself, or the program that it was split into."""
        found = self.split()
        if found.prepare is None:
            mesh = typed_mesh(self.leaves)
            if mesh is None:
                return self.traced.lower(lowering_platforms=lowering_platforms)
            # It was traced with types over an abstract mesh; these arguments say on which devices.
            args, kwargs = restore(jax.tree.unflatten(self.tree, self.leaves), self.static)
            with mesh_in_types(mesh):
                return self.jitted.trace(*args, **kwargs).lower(lowering_platforms=lowering_platforms)
        if lowering_platforms is not None:
            raise ValueError(
                f"lowering_platforms={lowering_platforms!r}: {self.fun_name} is lowered as a program over "
                "several TaskMeshes, for the platform of their devices. Leave it out"
            )
        return FlatLowered(self, found.program, found.input_shardings, found.prepare)


def _is_node(x: Any) -> bool:
    """Whether something among the flat function's arguments stands for an NNX object, in any mode."""
    return isinstance(x, (_compat.NODE, _compat.TREE_STATE)) or is_node(x)
