"""From a traced function to one flat list of equations.

`open_calls` takes the jaxpr of a function and inlines what stands between the user's equations and the
places they belong to: nested jits always; remat, custom derivatives and loops where more than one TaskMesh
is involved. A loop made by `mm.microbatch` becomes a `Loop`, and so does any other that is in no Loop and no
derivative; there it is distributed, or else unrolled. The branches of a `cond` are distributed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.distribute import branch, distribute
from mmnnx.mpmd.microbatch import LoopSpec, is_transformed, loop_spec
from mmnnx.mpmd.trace import (
    ACTIVATION,
    CONST,
    FREE,
    LAYOUT,
    Atom,
    Equation,
    Flat,
    Kind,
    Loop,
    Node,
    Origin,
    Var,
    at_home,
    combine,
    inline,
    is_var,
    join,
    nbytes,
    prune,
    read,
    rename,
    scopes_in,
)
from mmnnx.sharding.task import is_backward, scopes


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
      ValueError: for a `while` that contains more than one task, or such a `cond` that prints or calls back.
    """
    invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
    fresh = [jex.Var(v.aval) for v in invars]
    opener = _Opener(task_mesh, names)
    for var, home in zip(fresh, homes):
        opener.origin[var] = at_home(home)
    env = dict(zip(invars, fresh)) | {v: opener._constant(value, v.aval) for v, value in consts}
    nodes: list[Node] = []
    opener.open(eqns, env, "", nodes, InLoop.NO if loops else InLoop.MICROBATCHES)
    out = tuple(read(env, v) for v in outvars)
    return Flat(tuple(fresh), tuple(opener.constants), tuple(prune(nodes, out)), out)


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
        self.near: dict[Var, Sequence[Mesh]] = {}  # for what a distributed scan made, who has it at hand

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
            else:
                self._open_one(eqn, env, scope, out, in_loop)

    def _open_one(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node], in_loop: InLoop) -> None:
        """Opens an equation if it holds computation of several tasks."""
        name = eqn.primitive.name
        meshes = self._meshes(eqn, env, scope)
        if len(meshes) > 1 and name in ("cond", "while"):
            eqn = _compat.without_dead(eqn)
            if len(meshes := self._meshes(eqn, env, scope)) > 1:
                if name == "cond" and self._distribute_branches(eqn, env, scope, out):
                    return
                raise ValueError(_several_tasks(eqn, scope, [self.names[m] for m in meshes]))
        bodies = _compat.subjaxprs(eqn)
        if len(meshes) < 2 or name == "shard_map" or (name != "scan" and len(bodies) != 1):
            out.append(self._keep(eqn, env, scope))  # the last are such as a linear solve
        elif name == "scan":
            if is_transformed(scope):
                warnings.warn(
                    "a loop of mm.microbatch is inside a gradient or another transformation: its "
                    "microbatches do not overlap, and its schedule has no effect. Have the transformation "
                    "inside the loop, as in mm.microbatch(jax.value_and_grad(loss_fn), ...)",
                    stacklevel=2,
                )
            self._scan(eqn, env, scope, out, in_loop)
        else:
            self._inline(eqn, bodies[0], env, scope, out, in_loop)

    def _keep(self, eqn: Any, env: dict[Var, Atom], scope: str) -> Equation:
        if self.task_mesh(scope) is None:  # what has a task inside (checkpoint, scan, custom_vjp) is of it
            inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr))
            names = (name for s in dict.fromkeys(inside) for name in reversed(scopes(s)))
            scope = join(scope, next((name for name in names if self.task_mesh(name) is not None), ""))
        node = Equation(rename(eqn, env), scope)
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
        """The meshes of the tasks in an equation's body and of the state that it reads; none without body."""
        if not _compat.subjaxprs(eqn):
            return set()
        own = self.task_mesh(scope)
        found = {own} if own is not None else set()
        inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
        found |= {m for s in inside if (m := self.task_mesh(s)) is not None}
        if own is None:
            origins = (self.of(read(env, a)) for a in eqn.invars)
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
        eqns, outvars, inner = self._bind(jaxpr, [read(env, a) for a in eqn.invars])
        self.open(eqns, inner, scope, out, in_loop)
        env.update(zip(eqn.outvars, (read(inner, v) for v in outvars)))

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
        elif self._distribute(eqn, env, scope, out):
            return
        self._unroll(eqn, env, scope, out, in_loop)

    def _unroll(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node], in_loop: InLoop) -> None:
        """Writes the body of a scan once for each iteration."""
        scan = _Scan.of(eqn, env)
        slices = self._slices(scan, scope, out)
        carry, rows = scan.init, []
        for i in range(scan.length)[:: scan.turn]:
            row = [each[i] for each in slices]
            eqns, outvars, inner = self._bind(eqn.params["jaxpr"], [*scan.consts, *carry, *row])
            self.open(eqns, inner, scope, out, in_loop)
            results = [read(inner, v) for v in outvars]
            self._carried(results[: len(carry)], carry)
            carry = [self._counted(v, scope, out) for v in results[: len(carry)]]
            rows.append(results[len(carry) :])
        stacks = zip(*rows) if rows else [()] * (len(eqn.outvars) - len(carry))
        self._stack(eqn, env, carry, [stack[:: scan.turn] for stack in stacks], scope, out)

    def _counted(self, carry: Atom, scope: str, out: list[Node]) -> Atom:
        """A carry, kept if it is a counter: who reads it is not to count from the beginning each time."""
        if self.of(carry).kind is not Kind.FREE:
            return carry
        (copy,), (kept,) = inline(jnp.copy, carry, scope=scope)
        self._record(copy, FREE)
        out.append(dataclasses.replace(copy, kept=True))
        return kept

    def _distribute(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node]) -> bool:
        """Writes a scan as one scan for each task, one after the other; returns whether that can be done."""
        scan = _Scan.of(eqn, env)
        carry_in, slice_vars, body, results = self._body(scan, scope, InLoop.MICROBATCHES)
        equations = [e for e in prune(body, results) if isinstance(e, Equation)]  # which are all
        carry_out, ys = results[: len(carry_in)], results[len(carry_in) :]
        columns = dict(zip(slice_vars, scan.xs))  # of a variable, its values in all iterations

        def near(v: Var) -> Sequence[Mesh]:
            return self.near.get(columns.get(v, v), ())

        parts = distribute(equations, carry_in, carry_out, self._tie, near)
        if parts is None or any(e.eqn.effects for e in equations):
            return False
        # What is handed on and is a result as well, is one value.
        inside = {*carry_in, *(v for e in equations for v in e.outvars)}
        copied = {e.outvars[0]: e.invars[0] for e in equations if e.name == "copy"}
        ys = [copied[y] if copied.get(y) in inside else y for y in ys]
        carries: dict[Var, Var] = {}
        for part in parts:
            own = {v for e in part.nodes for v in e.outvars}
            enters, leaves, init = ([vs[i] for i in part.carries] for vs in (carry_in, carry_out, scan.init))
            gives = list(dict.fromkeys([*part.gives, *(y for y in ys if y in own or y in enters)]))
            reads = dict.fromkeys(a for e in part.nodes for a in e.invars if is_var(a) and a not in own)
            takes = [v for v in reads if v in columns and v not in enters]
            captured = [v for v in reads if v not in columns and v not in enters]
            eqns = [e.eqn for e in part.nodes]
            jaxpr = _compat.close_jaxpr([*captured, *enters, *takes], [*leaves, *gives], eqns)
            run = functools.partial(_run, jaxpr, len(captured), len(enters), eqn.params)
            within = next((e.scope for e in part.nodes if self.task_mesh(e.scope) is not None), scope)
            made = self._emit(run, [*captured, *init, *(columns[v] for v in takes)], within, out)
            carries.update(zip(leaves, made))
            columns.update(zip(gives, made[len(leaves) :]))
            for v in gives:
                readers = [each.mesh for each in parts if v in each.takes]
                self.near[columns[v]] = [mesh for mesh in (part.mesh, *readers) if mesh is not None]
        env.update(zip(eqn.outvars, [*(carries[v] for v in carry_out), *(columns[y] for y in ys)]))
        return True

    def _tie(self, e: Equation) -> Mesh | None:
        """The mesh of an equation's task, or of most of the state that it reads."""
        homes = [(nbytes(a), home) for a in e.invars if (home := self.of(a).home) is not None]
        return self.task_mesh(e.scope) or max(homes, key=lambda item: item[0], default=(0, None))[1]

    def _distribute_branches(self, eqn: Any, env: dict[Var, Atom], scope: str, out: list[Node]) -> bool:
        """Writes a cond as one cond for each task, one after the other; returns whether that can be done.

        What one of them hands to the next is zeros where another branch is taken.
        """
        index, *operands = (read(env, a) for a in eqn.invars)
        bodies: list[list[Node]] = []  # of each branch
        results: list[list[Atom]] = []
        for jaxpr in eqn.params["branches"]:
            eqns, outvars, inner = self._bind(jaxpr, operands)
            bodies.append([])
            self.open(eqns, inner, scope, bodies[-1], InLoop.MICROBATCHES)
            results.append([read(inner, v) for v in outvars])
        inside = {v for body in bodies for e in body for v in e.outvars}
        for k, column in enumerate(zip(*results)):
            if inside.isdisjoint(filter(is_var, column)):  # no branch computes it: it is chosen at home
                at_home = [n for n, a in enumerate(column) if self.of(a).home is not None]
                n = at_home[0] if at_home else 0
                (results[n][k],) = self._emit(jnp.copy, [column[n]], scope, bodies[n])
        pruned = [prune(body, row) for body, row in zip(bodies, results)]
        nodes = [[e for e in body if isinstance(e, Equation)] for body in pruned]  # which are all
        makers = [{v: e for e in body for v in e.outvars} for body in nodes]
        equations = [e for body in nodes for e in body]
        parts = distribute(equations, [], [], self._tie, lambda v: self.near.get(v, ()))
        if parts is None or any(e.eqn.effects for e in equations):
            return False
        number = {v: p for p, part in enumerate(parts) for e in part.nodes for v in e.outvars}
        # A result comes from the last of the parts that make it in one branch or another.
        columns = list(zip(*results))
        last = [max((number[v] for v in column if v in number), default=0) for column in columns]
        made: dict[Var, Var] = {}
        final: dict[int, Var] = {}
        for p, part in enumerate(parts):
            mine = [k for k, where in enumerate(last) if where == p]
            early = [v for k, where in enumerate(last) for v in columns[k] if number.get(v) == p < where]
            gives = list(dict.fromkeys([*part.gives, *early]))
            own = {v for e in part.nodes for v in e.outvars}
            read_in = [*(a for e in part.nodes for a in e.invars), *(a for k in mine for a in columns[k])]
            takes = list(dict.fromkeys(a for a in read_in if is_var(a) and a not in own))
            branches = []
            for n, maker in enumerate(makers):
                asked = [*(v if v in maker else None for v in gives), *(results[n][k] for k in mine)]
                types = [*(v.aval for v in gives), *(eqn.outvars[k].aval for k in mine)]
                eqns = [e.eqn for e in part.nodes if maker.get(e.outvars[0]) is e]
                branches.append(branch(takes, eqns, asked, types))
            within = next((e.scope for e in part.nodes if self.task_mesh(e.scope) is not None), scope)
            atoms = [index, *(made.get(v, v) for v in takes)]
            found = self._emit(functools.partial(_switch, branches), atoms, within, out)
            made.update(zip(gives, found))
            final.update(zip(mine, found[len(gives) :]))
            for v in gives:
                readers = [each.mesh for each in parts if v in each.takes]
                self.near[made[v]] = [mesh for mesh in (part.mesh, *readers) if mesh is not None]
        env.update((v, final[k]) for k, v in enumerate(eqn.outvars))
        return True

    def _loop(self, eqn: Any, spec: LoopSpec, env: dict[Var, Atom], scope: str, out: list[Node]) -> None:
        scan = _Scan.of(eqn, env)
        slices = [tuple(row[:: scan.turn]) for row in self._slices(scan, scope, out)]
        for x, row in zip(scan.xs, slices):
            self.layout_of.update((v, self.layout_of.get(x, x)) for v in row if is_var(x))
        # Each carry starts in a buffer of its own, so that it can be updated in place.
        init = [self._emit(jnp.copy, [a], scope, out)[0] for a in scan.init]
        inside = InLoop.ITERATIONS if loop_spec(scope) is None else InLoop.MICROBATCHES
        carry_in, slice_vars, body, results = self._body(scan, scope, inside)
        invariant, varying = _split_invariant(prune(body, results), {*carry_in, *slice_vars})
        out += invariant
        ahead = {v for node in invariant for v in node.outvars}
        copies: list[Any] = []
        results = [self._emit(jnp.copy, [v], scope, copies)[0] if v in ahead else v for v in results]
        carry_out, ys = results[: len(carry_in)], results[len(carry_in) :]
        carries = tuple(jex.Var(v.aval) for v in carry_in)
        stacks = tuple(tuple(jex.Var(y.aval) for _ in range(scan.length)) for y in ys)
        self._carried(carries, init)
        self.origin.update((v, ACTIVATION) for row in stacks for v in row)
        loop = Loop(
            dataclasses.replace(spec, length=scan.length),
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
        self._stack(eqn, env, carries, [row[:: scan.turn] for row in stacks], scope, out)

    def _body(
        self, scan: _Scan, scope: str, in_loop: InLoop
    ) -> tuple[list[Var], list[Var], list[Node], list[Var]]:
        """The body of a scan: variables for its carries and slices, equations, and their results."""
        jaxpr = scan.eqn.params["jaxpr"]
        body_vars = [jex.Var(v.aval) for v in _compat.open_jaxpr(jaxpr)[0][len(scan.consts) :]]
        carry_in, slice_vars = body_vars[: len(scan.init)], body_vars[len(scan.init) :]
        self._carried(carry_in, scan.init)
        self.origin.update((v, self.of(a)) for v, a in zip(slice_vars, scan.xs))
        eqns, outvars, inner = self._bind(jaxpr, [*scan.consts, *body_vars])
        body: list[Node] = []
        self.open(eqns, inner, scope, body, in_loop)
        results: list[Var] = []
        made = {v for node in body for v in node.outvars}
        for var in outvars:
            atom = read(inner, var)
            # A result that is no equation's own (an input, a constant, one result twice) gets an equation.
            if not is_var(atom) or atom not in made or atom in results:
                (atom,) = self._emit(jnp.copy, [atom], scope, body)
            results.append(atom)
        return carry_in, slice_vars, body, results

    def _slices(self, scan: _Scan, scope: str, out: list[Node]) -> list[list[Var]]:
        """What a scan goes over, taken apart."""
        # Positions are values, not literals: XLA then compiles one kernel for all slices of an array.
        count = scan.length if scan.xs else 0
        positions = [self._constant(np.int32(m), jax.typeof(np.int32(m))) for m in range(count)]
        return [self._emit(_slices, [x, *positions], scope, out) for x in scan.xs]

    def _stack(
        self,
        eqn: Any,
        env: dict[Var, Atom],
        carries: Sequence[Atom],
        stacks: Sequence[Sequence[Atom]],
        scope: str,
        out: list[Node],
    ) -> None:
        """The results of a scan: its carries, and what its iterations made, stacked."""
        stacked = []
        for v, row in zip(eqn.outvars[len(carries) :], stacks):
            stack = jnp.stack if row else functools.partial(jnp.zeros, v.aval.shape, v.aval.dtype)
            stacked += self._emit(lambda *row, stack=stack: stack(row) if row else stack(), row, scope, out)
        env.update(zip(eqn.outvars, [*carries, *stacked]))

    def _carried(self, carries: Sequence[Atom], before: Sequence[Atom]) -> None:
        """State that a loop carries is at home where it was before."""
        for v, origin in zip(carries, map(self.of, before)):
            if is_var(v) and origin.home is not None:
                self.origin[v] = origin
            elif is_var(v):
                self.origin.setdefault(v, ACTIVATION)


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan equation taken apart; `turn` is -1 if its last iteration comes first."""

    eqn: Any
    consts: list[Atom]
    init: list[Atom]
    xs: list[Atom]
    length: int
    turn: int

    @classmethod
    def of(cls, eqn: Any, env: dict[Var, Atom]) -> _Scan:
        num_consts, num_carry = _compat.scan_counts(eqn.params)
        args = [read(env, a) for a in eqn.invars]
        consts, init, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]
        return cls(eqn, consts, init, xs, eqn.params["length"], -1 if eqn.params["reverse"] else 1)


def _run(
    jaxpr: Any, num_consts: int, num_carry: int, like: dict[str, Any], *args: jax.Array
) -> list[jax.Array]:
    """A scan like another one, whose body is a jaxpr over constants, carries and slices."""
    consts, init, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]

    def body(carry, row):
        made = jex.jaxpr_as_fun(jaxpr)(*consts, *carry, *row)
        return tuple(made[:num_carry]), made[num_carry:]

    params = {name: like[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, init, xs, **params)
    return [*carry, *ys]


def _switch(branches: Sequence[Callable[..., Any]], index: jax.Array, *operands: jax.Array) -> Any:
    return jax.lax.switch(index, branches, *operands)


def _is_own_loop(eqn: Any, scope: str) -> bool:
    """Whether a scan can be a Loop: it is no part of a derivative, and holds no loop of `mm.microbatch`."""
    derivative = is_backward(scope) or "jvp(" in scope
    inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
    return eqn.params["length"] > 0 and not derivative and all(loop_spec(s) is None for s in inside)


def _slices(x: jax.Array, *positions: jax.Array) -> list[jax.Array]:
    index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [index(x, i) for i in positions]


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


def _callee(eqn: Any) -> Any:
    (jaxpr,) = _compat.subjaxprs(eqn)
    return jaxpr


def _several_tasks(eqn: Any, scope: str, tasks: Sequence[str]) -> str:
    name, where = eqn.primitive.name, f" under scope {scope!r}" if scope else ""
    help = (
        "How often it runs is known on one TaskMesh only. Use a lax.scan or fori_loop of a fixed length"
        if name == "while"
        else "It prints or calls back, which one TaskMesh would do for another. Leave that out"
    )
    return (
        f"a {name!r}{where} contains computation of {len(tasks)} tasks: {', '.join(sorted(tasks))}. {help}, "
        f"or put the whole {name!r} in one task (mm.task). It was traced at {_compat.source_line(eqn)}"
    )
