"""From a traced function to one flat list of equations.

`open_calls` takes the jaxpr of a function and inlines what stands between the user's equations and the
places they belong to: nested jits always; remat, custom derivatives and loops where more than one TaskMesh
is involved. A loop made by `mm.microbatch` becomes a `Loop`; any other loop over several tasks is unrolled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.microbatch import LoopSpec, is_transformed, loop_spec
from mmnnx.sharding.task import is_backward, scopes

Var = Any
Atom = Any


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One primitive application: `eqn` over the variables of the flat list, under its full name stack."""

    eqn: Any
    scope: str

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
    return flat, [_read(env, v) for v in outvars]


def _inline_eqn(eqn: Any, env: dict[Var, Atom], scope: str) -> list[Equation]:
    if eqn.primitive.name in ("jit", "pjit"):
        invars, outvars, eqns, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
        inner = dict(zip(invars, (_read(env, a) for a in eqn.invars)))
        inner |= {v: jex.Literal(c, v.aval) for v, c in consts}
        flat = [e for sub in eqns for e in _inline_eqn(sub, inner, scope)]
        env.update(zip(eqn.outvars, (_read(inner, v) for v in outvars)))
        return flat
    return [Equation(_rename(eqn, env), scope)]


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if is_var(atom) else atom


def _rename(eqn: Any, env: dict[Var, Atom]) -> Any:
    """The equation over the variables of `env`, with fresh results that `env` learns."""
    fresh = [jex.Var(v.aval) for v in eqn.outvars]
    out = eqn.replace(invars=[_read(env, a) for a in eqn.invars], outvars=fresh)
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


def open_calls(
    jaxpr: Any,
    homes: Sequence[Mesh | None],
    task_mesh: Callable[[str], Mesh | None],
    names: dict[Mesh, str],
    loops: bool = True,
) -> Flat:
    """Inlines the calls of `jaxpr` that stand across tasks.

    Args:
      jaxpr: a closed jaxpr.
      homes: for each of its inputs, the mesh where that state lives, None for inputs that live nowhere.
      task_mesh: from a name stack to the mesh of the task it lies in, None outside tasks.
      names: what messages call each mesh.
      loops: whether microbatch loops become a Loop; otherwise they stay a scan.

    Raises:
      ValueError: for a `cond` or `while` that contains more than one task.
    """
    invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
    fresh = [jex.Var(v.aval) for v in invars]
    opener = _Opener(task_mesh, names)
    for var, home in zip(fresh, homes):
        opener.origin[var] = at_home(home)
    env = dict(zip(invars, fresh)) | {v: opener._constant(value, v.aval) for v, value in consts}
    nodes: list[Node] = []
    opener.open(eqns, env, "", nodes, InLoop.NO if loops else InLoop.MICROBATCHES)
    out = tuple(_read(env, v) for v in outvars)
    return Flat(tuple(fresh), tuple(opener.constants), tuple(prune(nodes, out)), out)


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


class InLoop(enum.Enum):
    """Whether equations are in the body of a Loop."""

    NO = "no"
    MICROBATCHES = "one of mm.microbatch"
    ITERATIONS = "one that was a scan"


class _HoldsLoop(Exception):
    """The body of a scan that was to be a Loop holds another one."""


class _Opener:
    """The state of one pass of `open_calls`: what every variable seen so far is made of."""

    def __init__(self, task_mesh: Callable[[str], Mesh | None], names: dict[Mesh, str]):
        self.task_mesh, self.names = task_mesh, names
        self.origin: dict[Var, Origin] = {}
        self.constants: list[tuple[Var, Any]] = []
        self.layout_of: dict[Var, Var] = {}  # values that only lay out another one anew

    def open(
        self, eqns: Sequence[Any], env: dict[Var, Atom], prefix: str, out: list[Node], in_loop: InLoop
    ) -> None:
        for eqn in eqns:
            scope = join(prefix, str(eqn.source_info.name_stack))
            name = eqn.primitive.name
            if name in ("jit", "pjit", "closed_call", "core_call"):
                self._inline(eqn, _callee(eqn), env, scope, out, in_loop)
            elif name == "scan" and in_loop is InLoop.NO and (spec := loop_spec(scope)) is not None:
                self._loop(eqn, spec, env, scope, out)
            elif _compat.subjaxprs(eqn) and len(meshes := self._meshes(eqn, env, scope)) > 1:
                if name == "scan" and is_transformed(scope):
                    warnings.warn(
                        "a loop of mm.microbatch is inside a gradient or another transformation: it is "
                        "unrolled, and its schedule has no effect. Have the transformation inside the loop, "
                        "as in mm.microbatch(jax.value_and_grad(loss_fn), ...)",
                        stacklevel=2,
                    )
                if name == "scan":
                    self._scan(eqn, env, scope, out, in_loop)
                elif name in ("cond", "while"):
                    raise ValueError(_several_tasks(eqn, scope, [self.names[m] for m in meshes]))
                elif name == "shard_map" or len(_compat.subjaxprs(eqn)) > 1:  # such as a linear solve
                    out.append(self._keep(eqn, env, scope))
                else:
                    self._inline(eqn, _callee(eqn), env, scope, out, in_loop)
            else:
                out.append(self._keep(eqn, env, scope))

    def _keep(self, eqn: Any, env: dict[Var, Atom], scope: str) -> Equation:
        if self.task_mesh(scope) is None:  # what has a task inside (checkpoint, scan, custom_vjp) is of it
            inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr))
            names = (name for s in dict.fromkeys(inside) for name in reversed(scopes(s)))
            scope = join(scope, next((name for name in names if self.task_mesh(name) is not None), ""))
        node = Equation(_rename(eqn, env), scope)
        origin = combine(self.of(a) for a in node.invars)
        if self.task_mesh(scope) is not None:
            origin = ACTIVATION
        self._record(node, origin)
        return node

    def _record(self, node: Equation, origin: Origin) -> None:
        self.origin.update((v, origin) for v in node.outvars)
        if node.name in LAYOUT and node.name != "broadcast_in_dim" and is_var(node.invars[0]):
            root = self.layout_of.get(node.invars[0], node.invars[0])
            self.layout_of.update((v, root) for v in node.outvars)

    def of(self, atom: Atom) -> Origin:
        return self.origin[atom] if is_var(atom) else CONST

    def _meshes(self, eqn: Any, env: dict[Var, Atom], scope: str) -> set[Mesh]:
        """The meshes of the tasks in an equation's body and of the state that it reads."""
        own = self.task_mesh(scope)
        found = {own} if own is not None else set()
        inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
        found |= {m for s in inside if (m := self.task_mesh(s)) is not None}
        if own is None:
            origins = (self.of(_read(env, a)) for a in eqn.invars)
            found |= {o.home for o in origins if o.home is not None}
        return found

    def _bind(self, jaxpr: Any, args: Sequence[Atom]) -> tuple[list[Any], list[Atom], dict[Var, Atom]]:
        invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip(invars, args))
        env.update((var, self._constant(value, var.aval)) for var, value in consts)
        return eqns, outvars, env

    def _constant(self, value: Any, aval: Any) -> Var:
        var = jex.Var(aval)
        self.constants.append((var, value))
        self.origin[var] = FREE
        return var

    def _inline(
        self, eqn: Any, jaxpr: Any, env: dict[Var, Atom], scope: str, out: list[Node], in_loop: InLoop
    ) -> None:
        eqns, outvars, inner = self._bind(jaxpr, [_read(env, a) for a in eqn.invars])
        self.open(eqns, inner, scope, out, in_loop)
        env.update(zip(eqn.outvars, (_read(inner, v) for v in outvars)))

    def _emit(self, fun: Callable, atoms: Sequence[Atom], scope: str, out: list[Node]) -> list[Var]:
        """Appends the equations of `fun` over `atoms`."""
        flat, results = inline(fun, *atoms, scope=scope)
        for node in flat:
            self._record(node, combine(self.of(a) for a in node.invars))
        out += flat
        return results

    def _scan(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node], in_loop: InLoop) -> None:
        """A scan over several tasks that is no loop of `mm.microbatch`."""
        if in_loop is not InLoop.MICROBATCHES and _is_own_loop(eqn, scope):
            if in_loop is InLoop.ITERATIONS:
                raise _HoldsLoop
            try:
                return self._loop(eqn, LoopSpec(), env, scope, out)
            except _HoldsLoop:
                pass  # loops do not nest; the inner one is where work can overlap
        self._unroll(eqn, env, scope, out, in_loop)

    def _unroll(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node], in_loop: InLoop) -> None:
        """A scan over several tasks whose trip count is known: its body, once per iteration."""
        num_consts, num_carry = _compat.scan_counts(eqn.params)
        args = [_read(env, a) for a in eqn.invars]
        consts, carry, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
        length = eqn.params["length"]
        order = reversed(range(length)) if eqn.params["reverse"] else range(length)
        slices = self._slices(xs, length, scope, out)
        rows: dict[int, list[Atom]] = {}
        for i in order:
            row = [each[i] for each in slices]
            eqns, outvars, inner = self._bind(eqn.params["jaxpr"], [*consts, *carry, *row])
            self.open(eqns, inner, scope, out, in_loop)
            results = [_read(inner, v) for v in outvars]
            self._carried(results[:num_carry], carry)
            carry, rows[i] = results[:num_carry], results[num_carry:]
        columns = [[rows[i][j] for i in range(length)] for j in range(len(eqn.outvars) - num_carry)]
        stacked = [self._emit(lambda *ys: jnp.stack(ys), ys, scope, out)[0] for ys in columns]
        env.update(zip(eqn.outvars, [*carry, *stacked]))

    def _loop(self, eqn: Any, spec: LoopSpec, env: dict[Var, Atom], scope: str, out: list[Node]) -> None:
        num_consts, num_carry = _compat.scan_counts(eqn.params)
        args = [_read(env, a) for a in eqn.invars]
        consts, init, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
        length = eqn.params["length"]
        turn = -1 if eqn.params["reverse"] else 1
        slices = [tuple(row[::turn]) for row in self._slices(xs, length, scope, out)]
        for x, row in zip(xs, slices):
            self.layout_of.update((v, self.layout_of.get(x, x)) for v in row if is_var(x))
        # Each carry starts in a buffer of its own, so that it can be updated in place.
        init = [self._emit(jnp.copy, [a], scope, out)[0] for a in init]
        body_vars = [jex.Var(v.aval) for v in _compat.open_jaxpr(eqn.params["jaxpr"])[0][num_consts:]]
        carry_in, slice_vars = body_vars[:num_carry], body_vars[num_carry:]
        self._carried(carry_in, init)
        self.origin.update((v, self.of(a)) for v, a in zip(slice_vars, xs))
        eqns, outvars, inner = self._bind(eqn.params["jaxpr"], [*consts, *body_vars])
        body: list[Node] = []
        inside = InLoop.ITERATIONS if loop_spec(scope) is None else InLoop.MICROBATCHES
        self.open(eqns, inner, scope, body, inside)
        results: list[Var] = []
        made = {v for node in body for v in node.outvars}
        for var in outvars:
            atom = _read(inner, var)
            # A result that is no equation's own (an input, a constant, one result twice) gets an equation.
            if not is_var(atom) or atom not in made or atom in results:
                (atom,) = self._emit(jnp.copy, [atom], scope, body)
            results.append(atom)
        invariant, varying = _split_invariant(prune(body, results), {*carry_in, *slice_vars})
        out += invariant
        ahead = {v for node in invariant for v in node.outvars}
        copies: list[Any] = []
        results = [self._emit(jnp.copy, [v], scope, copies)[0] if v in ahead else v for v in results]
        carry_out, ys = results[:num_carry], results[num_carry:]
        carries = tuple(jex.Var(v.aval) for v in carry_in)
        stacks = tuple(tuple(jex.Var(y.aval) for _ in range(length)) for y in ys)
        self._carried(carries, init)
        self.origin.update((v, ACTIVATION) for row in stacks for v in row)
        loop = Loop(
            dataclasses.replace(spec, length=length),
            (*varying, *copies),
            tuple(init),
            tuple(carry_in),
            tuple(carry_out),
            tuple(slices),
            tuple(slice_vars),
            tuple(ys),
            carries,
            stacks,
            {
                v: self.layout_of[v]
                for v in (*init, *(v for row in slices for v in row))
                if v in self.layout_of
            },
        )
        out.append(loop)
        stacked = [self._emit(lambda *ys: jnp.stack(ys), row[::turn], scope, out)[0] for row in stacks]
        env.update(zip(eqn.outvars, [*carries, *stacked]))

    def _carried(self, carries: Sequence[Atom], before: Sequence[Atom]) -> None:
        """State that a loop carries is at home where it was before."""
        for v, origin in zip(carries, map(self.of, before)):
            if is_var(v) and origin.home is not None:
                self.origin[v] = origin
            elif is_var(v):
                self.origin.setdefault(v, ACTIVATION)

    def _slices(self, xs: Sequence[Atom], length: int, scope: str, out: list[Node]) -> list[list[Var]]:
        """Each of `xs` taken apart along its first dimension."""
        # Positions are values, not literals: XLA then compiles one kernel for all slices of an array.
        positions = [self._constant(np.int32(m), jax.typeof(np.int32(m))) for m in range(length if xs else 0)]
        return [self._emit(_slices, [x, *positions], scope, out) for x in xs]


def _is_own_loop(eqn: Any, scope: str) -> bool:
    """Whether a scan can be a Loop: it is no part of a derivative, and holds no loop of `mm.microbatch`."""
    derivative = is_backward(scope) or "jvp(" in scope
    inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
    return eqn.params["length"] > 0 and not derivative and all(loop_spec(s) is None for s in inside)


def _slices(x: jax.Array, *positions: jax.Array) -> list[jax.Array]:
    index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [index(x, i) for i in positions]


# Equations that only lay out bytes anew. Done ahead of the loop they would cost memory and save nothing.
LAYOUT = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "copy"}


def _split_invariant(body: Sequence[Any], varying: set[Var]) -> tuple[list[Equation], list[Equation]]:
    """Separates what does not depend on the microbatch, to be done once before the loop, from what does."""
    varying = set(varying)
    own = {v for e in body for v in e.outvars}
    constant: set[Var] = set()
    hoisted = []
    for e in body:
        atoms = [a for a in e.invars if is_var(a)]
        if any(a in varying for a in atoms) or e.eqn.effects:
            varying.update(e.outvars)
        elif all(a in own and a in constant for a in atoms):
            constant.update(e.outvars)  # of literals alone: as cheap inside
        else:
            hoisted.append(e)
    keep = {v for e in hoisted for v in e.outvars}
    used_by: dict[Var, list[Any]] = {v: [] for v in keep}
    for e in body:
        for a in e.invars:
            if is_var(a) and a in keep:
                used_by[a].append(e)
    for e in reversed(hoisted):
        if e.name in LAYOUT and not any(keep & set(u.outvars) for v in e.outvars for u in used_by[v]):
            keep -= set(e.outvars)
    chosen = [e for e in hoisted if keep & set(e.outvars)]
    # Literal-only equations that a hoisted one reads go along.
    needed = {a for e in chosen for a in e.invars if is_var(a)}
    for e in reversed(body):
        if constant & set(e.outvars) and needed & set(e.outvars):
            needed.update(a for a in e.invars if is_var(a))
    moved = {id(e) for e in chosen} | {id(e) for e in body if constant & needed & set(e.outvars)}
    return [e for e in body if id(e) in moved], [e for e in body if id(e) not in moved]


def join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def _callee(eqn: Any) -> Any:
    (jaxpr,) = _compat.subjaxprs(eqn)
    return jaxpr


def scopes_in(jaxpr: Any, prefix: str = "") -> Iterable[str]:
    """Name stacks of all equations in a jaxpr and in the jaxprs inside it."""
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        scope = join(prefix, str(eqn.source_info.name_stack))
        yield scope
        for inner in _compat.subjaxprs(eqn):
            yield from scopes_in(inner, scope)


def _several_tasks(eqn: Any, scope: str, tasks: Sequence[str]) -> str:
    name, where = eqn.primitive.name, f" under scope {scope!r}" if scope else ""
    return (
        f"a {name!r}{where} contains computation of {len(tasks)} tasks: {', '.join(sorted(tasks))}. "
        "Which branch or how many iterations run is known on one TaskMesh only. "
        f"Put the whole {name!r} in one task (mm.task), move the other tasks' work out of it, choose with "
        "jnp.where, or use a lax.scan or Python loop with a fixed trip count, which mm.jit unrolls. "
        "(optax.MultiSteps and optax.apply_if_finite are such a cond over a whole optimizer: accumulate with "
        f"mm.microbatch, guard with jnp.where.) It was traced at {_compat.source_line(eqn)}"
    )
