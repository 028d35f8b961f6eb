"""A function lowered and compiled as a program of fragments, with all that such stages of JAX have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.compile.figures import layouts_of, lower_fragments, total_cost, total_memory
from mmnnx.mpmd.ir.equations import Atom, Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.jit.argument_types import avals_of
from mmnnx.mpmd.runtime.pieces import AroundPieces
from mmnnx.mpmd.runtime.prepare import Prepared
from mmnnx.mpmd.runtime.put import put
from mmnnx.mpmd.runtime.references import AroundReferences


class FlatLowered:
    """A function split into fragments, to be compiled.

    Args:
      traced: the `FlatTraced` that it was made of; what that has, this has.
      program: the fragments.
      derive: derives where each flat argument would best live.
      prepare: compiles the program with options for XLA.
    """

    def __init__(
        self,
        traced: Any,
        program: Program,
        derive: Callable[[], Sequence[NamedSharding]],
        prepare: Callable[[CompilerOptions], Prepared | AroundPieces | AroundReferences],
    ):
        self.traced, self.program, self.derive, self.prepare = traced, program, derive, prepare

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)

    @functools.cached_property
    def fragments(self) -> dict[str, jax.stages.Lowered]:
        """Each fragment of the program, by name, lowered by itself."""
        return {self.program.labels[f]: lowered for f, lowered in self._lowered.items()}

    @functools.cached_property
    def _lowered(self) -> dict[Fragment, jax.stages.Lowered]:
        return lower_fragments(self.program)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as it prints; with a dialect ("stablehlo", "hlo") each of its fragments in that.

        Raises:
          ValueError: for another dialect.
        """
        if dialect is None:
            return str(self.program)
        _check_dialect(dialect)
        return _headed(
            {name: f.as_text(dialect, debug_info=debug_info) for name, f in self.fragments.items()}
        )

    def compiler_ir(self, dialect: str | None = None) -> dict[str, Any]:
        """The representation of each fragment, by name."""
        _check_dialect(dialect)
        return {name: f.compiler_ir(dialect) for name, f in self.fragments.items()}

    def cost_analysis(self) -> dict[str, float]:
        """The costs of one call of the function, before optimisation: each fragment as often as it runs."""
        return total_cost(self.program, self._lowered)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> FlatCompiled:
        """Compiles the program. Options are added to those that mm.jit was given."""
        options = {**dict(self.traced.xla.compiler), **(compiler_options or {})}
        return FlatCompiled(self, self.prepare(tuple(sorted(options.items()))))


class FlatCompiled:
    """A compiled program, to be called with arguments of the types and homes it was compiled for.

    As with what JAX compiles, static arguments are left out.

    Args:
      lowered: what it was compiled of; what that has, this has.
      prepared: what runs it.
    """

    def __init__(self, lowered: FlatLowered, prepared: Prepared | AroundPieces | AroundReferences):
        self.lowered, self.prepared = lowered, prepared

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
        return jax.tree.unflatten(traced.out_tree, self.prepared(self._checked(leaves)))

    def _checked(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments, each where it was when the function was lowered.

        Raises:
          TypeError, ValueError: for one of another type, or that somebody has put elsewhere.
        """
        later = self.prepared.interface.next_shardings
        return [self._check(n, x, later.get(n)) for n, x in enumerate(leaves)]

    def _check(self, n: int, x: Any, later: NamedSharding | None) -> Any:
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"Cannot apply JAX transformations to {self.lowered.traced.fun_name}, which was compiled for "
                "certain arguments: transform it first, as in mm.jit(nnx.grad(f)).lower(...).compile()"
            )
        ((found,), (expected, home)) = avals_of([x], typed=False), self._expected[n]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise TypeError(
                f"{self._name(n)} was compiled for the type {_short(expected)}, and is called with "
                f"{_short(found)}: lower it for this one, or call what mm.jit made, which compiles for what "
                "it is given"
            )
        if home is None or isinstance(x, jax.Ref):  # what it holds is brought to where it is read
            return x
        if not is_committed(x):
            return put(x, home)
        if not any(x.sharding.is_equivalent_to(s, x.ndim) for s in (home, later) if s is not None):
            raise ValueError(
                f"{self._name(n)}, {_short(found)}, was compiled for the sharding {home}, and is called with "
                f"{x.sharding}: lower it for this one, or move the argument with jax.device_put"
            )
        return x

    @functools.cached_property
    def _expected(self) -> list[tuple[jax.ShapeDtypeStruct, Any]]:
        """The type of each argument, and where it lives, if that was said."""
        described = lambda x: isinstance(x, jax.ShapeDtypeStruct) or is_committed(x)
        leaves = self.lowered.traced.leaves
        avals = avals_of(leaves, typed=False)
        return [(aval, x.sharding if described(x) else None) for aval, x in zip(avals, leaves)]

    def _name(self, n: int) -> str:
        return f"{self.lowered.traced.record.names()[n]} of {self.lowered.traced.fun_name}"

    @functools.cached_property
    def fragments(self) -> dict[str, jax.stages.Compiled]:
        """What was compiled for each fragment, by name; in several processes, for those of this one.

        What always follows each other on a mesh is one fragment here, unlike in the program as it prints.
        """
        labels = self.prepared.compiled.program.labels
        return {labels[f]: e.call for f, e in self.prepared.compiled.executables.items()}

    def as_text(self) -> str:
        """What XLA made of each fragment."""
        return _headed({name: f.as_text() or "" for name, f in self.fragments.items()})

    def cost_analysis(self) -> dict[str, float]:
        """The costs of one call of the function: each fragment as often as it runs.

        As always with XLA, those of a fragment are those of one of the devices of its mesh.
        """
        compiled = self.prepared.compiled
        return total_cost(compiled.program, {f: e.call for f, e in compiled.executables.items()})

    def memory_analysis(self) -> Any:
        """The memory of all fragments together, each of one device of its mesh, field by field.

        Fragments that do not run at the same time are counted all the same: `Program.simulate` has the bytes
        that are in use at once on each mesh.
        """
        return total_memory(self.fragments.values())

    @property
    def input_shardings(self) -> Any:
        """Where the arguments would best live: a tree (args, kwargs)."""
        return self.lowered.traced.input_shardings()

    @property
    def input_formats(self) -> Any:
        """The layouts and shardings of the arguments; no layout for what is not read."""
        variables, shardings = self.prepared.interface.arguments, self.lowered.derive()
        formats = [Format(self._layout(v), s) for v, s in zip(variables, shardings)]
        return self.lowered.traced.for_arguments(formats)

    @property
    def output_shardings(self) -> Any:
        """Where the results are, as a tree like `out_tree`."""
        return jax.tree.unflatten(self.out_tree, self._output_shardings)

    @property
    def output_formats(self) -> Any:
        """The layouts and shardings of the results; no layout for what no fragment makes."""
        return jax.tree.unflatten(self.out_tree, self._output_formats)

    @property
    def out_info(self) -> Any:
        """Shapes, dtypes, layouts and shardings of the results."""
        avals = self.lowered.traced.jaxpr.out_avals
        infos = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=f) for a, f in zip(avals, self._output_formats)
        ]
        return jax.tree.unflatten(self.out_tree, infos)

    @functools.cached_property
    def _output_shardings(self) -> list[Any]:
        anywhere = jnp.zeros(()).sharding
        found = self.prepared.interface.result_shardings
        # Behind the results stands what references hold in the end.
        return [s or anywhere for s in found[: self.out_tree.num_leaves]]

    @property
    def _output_formats(self) -> list[Format]:
        layouts = map(self._layout, self.prepared.interface.results)
        return [Format(layout, s) for layout, s in zip(layouts, self._output_shardings)]

    def _layout(self, atom: Atom | None) -> Any:
        return self._layouts.get(atom) if atom is not None and is_var(atom) else None

    @functools.cached_property
    def _layouts(self) -> dict[Var, Any]:
        return layouts_of(self.prepared.compiled)

    def runtime_executable(self) -> None:
        """None: there are several. `fragments` has each."""


def _headed(texts: Mapping[str, str]) -> str:
    return "\n\n".join(f"// {name}\n{text}" for name, text in texts.items())


def _check_dialect(dialect: str | None) -> None:
    if dialect not in (None, "stablehlo", "hlo"):
        raise ValueError(f"unknown dialect: {dialect}. There are 'stablehlo' and 'hlo'")


def _short(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
