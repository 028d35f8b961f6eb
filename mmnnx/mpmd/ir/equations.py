"""A function as one flat list of equations: what the passes of mmnnx read and write."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.frontend.microbatch import LoopSpec

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
      init: outer atoms, the carries before the first microbatch.
      carry_in, carry_out: body variables, the carries before and after one microbatch.
      slices: for each sliced input, one outer variable per microbatch.
      slice_vars: the body variables that stand for them.
      ys: body variables, results that are kept per microbatch.
      carries: outer variables, the carries after the last microbatch.
      stacks: for each of `ys`, one outer variable per microbatch.
      sources: for outer variables of `init` and `slices`, the input that they are a layout of, if any.
      parts: for carries that hold parts of a sum, the mesh axes of each of their leading dimensions.
      undivided: for carries that XLA sums up over a mesh axis in every microbatch, if any, why.
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
    undivided: dict[Var, str] = dataclasses.field(default_factory=dict)

    @property
    def captured(self) -> list[Var]:
        """Outer variables that the body names."""
        own = {*self.carry_in, *self.slice_vars, *(v for e in self.body for v in e.outvars)}
        used = [a for e in self.body for a in e.invars if is_var(a)]
        used += [*self.carry_out, *self.ys]
        return list(dict.fromkeys(v for v in used if v not in own))

    @property
    def invars(self) -> list[Atom]:
        return [*self.init, *(v for row in self.slices for v in row), *self.captured]

    @property
    def outvars(self) -> list[Var]:
        return [*self.carries, *(v for row in self.stacks for v in row)]


Node = Equation | Loop


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, jex.Literal)


def nbytes(atom: Atom) -> int:
    """Bytes of one value; typed PRNG keys count as what they hold."""
    dtype = atom.aval.dtype
    itemsize = dtype.itemsize if isinstance(dtype, np.dtype) else 8
    return math.prod(atom.aval.shape) * itemsize


def inline(fun: Callable, *atoms: Atom, scope: str) -> tuple[list[Equation], list[Var]]:
    """Traces `fun` over the types of `atoms` and returns its equations on them, and the results."""
    args = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    invars, outvars, eqns, consts = _compat.open_jaxpr(jax.make_jaxpr(fun)(*args))
    env = dict(zip(invars, atoms)) | {v: jex.Literal(c, v.aval) for v, c in consts}
    flat: list[Equation] = []
    for eqn in eqns:
        flat += _inline_eqn(eqn, env, scope)
    return flat, [read(env, v) for v in outvars]


def _inline_eqn(eqn: Any, env: dict[Var, Atom], scope: str) -> list[Equation]:
    if eqn.primitive.name in ("jit", "pjit"):
        invars, outvars, eqns, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
        inner = dict(zip(invars, (read(env, a) for a in eqn.invars)))
        inner |= {v: jex.Literal(c, v.aval) for v, c in consts}
        flat = [e for sub in eqns for e in _inline_eqn(sub, inner, scope)]
        env.update(zip(eqn.outvars, (read(inner, v) for v in outvars)))
        return flat
    return [Equation(rename(eqn, env), scope)]


def read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if is_var(atom) else atom


def rename(eqn: Any, env: dict[Var, Atom]) -> Any:
    """The equation over the variables of `env`, with fresh results that `env` learns."""
    fresh = [jex.Var(v.aval) for v in eqn.outvars]
    out = eqn.replace(invars=[read(env, a) for a in eqn.invars], outvars=fresh)
    env.update(zip(eqn.outvars, fresh))
    return out


# What a value is made of. It decides who must hold it and what a piece of computation is tied to.
class Kind(enum.Enum):
    CONST = "const"  # of literals alone
    FREE = "free"  # of inputs that live nowhere in particular: batches, counters, keys
    STATE = "state"  # of placed state of one home
    ACTIVATION = "activation"  # of anything else


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The kind of a value, and its home: that of state, and of an activation the mesh it was placed on."""

    kind: Kind
    home: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """The home of what has one: state, and activations that are placed."""
        assert self.home is not None
        return self.home


CONST, FREE, ACTIVATION = Origin(Kind.CONST), Origin(Kind.FREE), Origin(Kind.ACTIVATION)


def at_home(home: Mesh | None) -> Origin:
    """The origin of state that lives on a mesh, or of an input that lives nowhere in particular."""
    return FREE if home is None else Origin(Kind.STATE, home)


def combine(origins: Iterable[Origin]) -> Origin:
    """The origin of what is computed from values of the given origins."""
    out = CONST
    for origin in origins:
        if origin == out or origin.kind is Kind.CONST:
            continue
        elif out.kind is Kind.CONST:
            out = origin
        else:
            return ACTIVATION
    return out


@dataclasses.dataclass(frozen=True)
class Flat:
    """A function as one flat list: `nodes` computing `outvars` from `invars` and constants."""

    invars: tuple[Var, ...]
    constants: tuple[tuple[Var, Any], ...]
    nodes: tuple[Node, ...]
    outvars: tuple[Atom, ...]


def prune(nodes: Sequence[Node], outputs: Iterable[Atom]) -> list[Node]:
    """Drops the nodes that `outputs` do not depend on."""
    live = {a for a in outputs if is_var(a)}
    kept: list[Node] = []
    for node in reversed(nodes):
        effects = isinstance(node, Equation) and node.eqn.effects
        if effects or any(v in live for v in node.outvars):
            kept.append(node)
            live.update(a for a in node.invars if is_var(a))
    return kept[::-1]


# Equations that compute a jaxpr as it stands.
CALLS = {"jit", "pjit", "closed_call", "core_call"}

# Equations that only lay out bytes anew. Done ahead of the loop they would cost memory and save nothing.
LAYOUT = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "copy"}


def join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def scopes_in(jaxpr: Any, prefix: str = "") -> Iterable[str]:
    """Name stacks of all equations in a jaxpr and in the jaxprs inside it."""
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        scope = join(prefix, str(eqn.source_info.name_stack))
        yield scope
        for inner in _compat.subjaxprs(eqn):
            yield from scopes_in(inner, scope)
