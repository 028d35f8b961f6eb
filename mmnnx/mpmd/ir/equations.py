"""A function as one flat list of equations: what the passes of mmnnx read and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from mmnnx import _compat
from mmnnx.mpmd.ir.loop_spec import LoopSpec

Var = Any
Atom = Any


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One primitive application: `eqn` over the variables of the flat list, under its full name stack.

    Attributes:
      kept: whether its result is kept for all that read it, though it be cheap.
    """

    eqn: Any
    scope: str
    kept: bool = False

    @property
    def invars(self) -> Sequence[Atom]:
        return self.eqn.invars

    @property
    def outvars(self) -> Sequence[Var]:
        return self.eqn.outvars

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """A microbatch loop. Its body names outer variables directly; what it needs per microbatch is explicit.

    Attributes:
      spec: schedule and size, as given to `mm.microbatch`.
      body: the equations of one microbatch.
      init: outer variables, the carries before the first microbatch.
      carry_in, carry_out: body variables, the carries before and after one microbatch.
      slices: for each sliced input, one outer variable per microbatch.
      slice_vars: the body variables that stand for them.
      ys: body variables, results that are kept per microbatch.
      carries: outer variables, the carries after the last microbatch.
      stacks: for each of `ys`, one outer variable per microbatch.
      sources: for outer variables of `init` and `slices`, the input that they are a layout of, if any.
      parts: for carries that hold parts of a sum, the mesh axes of each of their leading dimensions.
      not_hoisted: for carries that XLA sums up over a mesh axis in every microbatch, if any, why.
    """

    spec: LoopSpec
    body: tuple[Equation, ...]
    init: tuple[Atom, ...]
    carry_in: tuple[Var, ...]
    carry_out: tuple[Var, ...]
    slices: tuple[tuple[Var, ...], ...]
    slice_vars: tuple[Var, ...]
    ys: tuple[Var, ...]
    carries: tuple[Var, ...]
    stacks: tuple[tuple[Var, ...], ...]
    sources: dict[Var, Var]
    parts: dict[Var, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    not_hoisted: dict[Var, str] = dataclasses.field(default_factory=dict)

    @property
    def captured(self) -> list[Var]:
        """Outer variables that the body names."""
        return captured_by(self.body, [*self.carry_in, *self.slice_vars], [*self.carry_out, *self.ys])

    @property
    def invars(self) -> list[Atom]:
        return [*self.init, *(v for row in self.slices for v in row), *self.captured]

    @property
    def outvars(self) -> list[Var]:
        return [*self.carries, *(v for row in self.stacks for v in row)]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class While:
    """A loop that goes on for as long as its first carry is true. Its body names outer variables directly.

    Attributes:
      body: the nodes of one iteration.
      init: outer variables, the carries before the first iteration.
      carry_in, carry_out: body variables, the carries before and after one iteration. The first is whether
        there is another.
      carries: outer variables, the carries after the last iteration.
      sources: for variables of `init`, the input that they are a layout of, if any.
    """

    body: tuple[Node, ...]
    init: tuple[Var, ...]
    carry_in: tuple[Var, ...]
    carry_out: tuple[Var, ...]
    carries: tuple[Var, ...]
    sources: dict[Var, Var]

    @property
    def captured(self) -> list[Var]:
        """Outer variables that the body names."""
        return captured_by(self.body, self.carry_in, self.carry_out)

    @property
    def invars(self) -> list[Atom]:
        return [*self.init, *self.captured]

    @property
    def outvars(self) -> Sequence[Var]:
        return self.carries


Node = Equation | Loop | While


def captured_by(body: Sequence[Node], given: Sequence[Var], results: Sequence[Var]) -> list[Var]:
    """What a body reads or returns and is neither given nor makes."""
    own = {*given, *(v for e in body for v in e.outvars)}
    used = [a for e in body for a in e.invars if is_var(a)]
    return list(dict.fromkeys(v for v in (*used, *results) if v not in own))


def with_bodies(nodes: Sequence[Node]) -> Iterator[Node]:
    """Nodes, and those in the bodies of loops among them."""
    for node in nodes:
        yield node
        if not isinstance(node, Equation):
            yield from with_bodies(node.body)


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, jex.Literal)


def nbytes(atom: Atom) -> int:
    """Bytes of one value; typed PRNG keys count as what they hold."""
    return nbytes_of(atom.aval.shape, atom.aval.dtype)


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array, likewise."""
    return math.prod(shape) * (dtype.itemsize if isinstance(dtype, np.dtype) else 8)


@dataclasses.dataclass(frozen=True)
class Flat:
    """A function as one flat list: `nodes` computing `outvars` from `invars` and constants."""

    invars: tuple[Var, ...]
    constants: tuple[tuple[Var, Any], ...]
    nodes: tuple[Node, ...]
    outvars: tuple[Atom, ...]


# Equations that compute a jaxpr as it stands.
CALLS = {"jit", "closed_call", "eval_jaxpr"}

# Those that differentiation looks at first: of jax.checkpoint, and of functions with gradients of their own.
REMAT = "remat2"
CUSTOM_GRADIENTS = {"custom_jvp_call", "custom_vjp_call"}

# Equations that multiply matrices, in which nearly all floating-point operations are.
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

# Equations that only lay out bytes anew. Done ahead of the loop they would cost memory and save nothing.
LAYOUT = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "copy"}

# What is cheaper to compute again than to keep: entry by entry, and sums.
CHEAP = LAYOUT | {
    "abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "cos", "custom_jvp_call",
    "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite",
    "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not",
    "one_minus_square", "or", "pow", "reduce_max", "reduce_min", "reduce_sum", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip

# What is computed again of state where it is read, if that is fewer bytes to send.
_REPEATED = CHEAP | {*SCATTERS, "gather", "dynamic_slice", "concatenate", "pad", "argmax", "argmin"}


def is_cheap(e: Equation) -> bool:
    """Whether an equation is cheaper to compute again than its results are to keep."""
    return all(inner.primitive.name in CHEAP for inner in with_inner(e.eqn))


def is_repeated(e: Equation) -> bool:
    """Whether an equation is computed again on another mesh, rather than its results sent, if what it is made
    of has fewer bytes."""
    return all(inner.primitive.name in _REPEATED for inner in with_inner(e.eqn))


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, each followed by those in the jaxprs inside it."""
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        yield from with_inner(eqn)


def with_inner(eqn: Any) -> Iterator[Any]:
    """An equation, then those in the jaxprs inside it."""
    yield eqn
    for jaxpr in _compat.subjaxprs(eqn):
        yield from equations_in(jaxpr)


def holds(eqn: Any, name: str) -> bool:
    """Whether an equation, or one in the jaxprs inside it, is of a primitive."""
    return any(e.primitive.name == name for e in with_inner(eqn))


def join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def scopes_in(jaxpr: Any, prefix: str = "") -> Iterable[str]:
    """Name stacks of all equations in a jaxpr and in the jaxprs inside it."""
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        scope = join(prefix, str(eqn.source_info.name_stack))
        yield scope
        for inner in _compat.subjaxprs(eqn):
            yield from scopes_in(inner, scope)
