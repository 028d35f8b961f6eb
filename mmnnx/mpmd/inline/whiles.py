"""A while over several tasks: a `While`, whose iterations the host starts one by one.

Its condition is computed before the first iteration, and at the end of each for the next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.inline.loop_invariants import split_invariant
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Node, While
from mmnnx.mpmd.ir.rewrite import prune


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The operands of a while: constants of its condition, those of its body, and carries."""

    cond_consts: list[Any]
    body_consts: list[Any]
    init: list[Any]

    @classmethod
    def of(cls, eqn: Any, args: Sequence[Any]) -> _Operands:
        """Operands taken apart."""
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        return cls(list(args[:first]), list(args[first:second]), list(args[second:]))


def write_while(writer: Writer, eqn: Any, scope: str, out: list[Node]) -> Sequence[Atom]:
    """Writes a while of several tasks as a While; its results in the list."""
    if eqn.params["cond_jaxpr"].out_avals[0].shape:
        return write_traced(writer, functools.partial(_of_one_condition, eqn), eqn.invars, scope, out)
    given, passed = _Operands.of(eqn, eqn.invars), _passed_on(eqn)
    changing = [n for n in range(len(given.init)) if n not in passed]

    def condition(carries: Sequence[Atom], nodes: list[Node]) -> Atom:
        args = [*given.cond_consts, *carries]
        return writer.write_jaxpr(eqn.params["cond_jaxpr"], args, scope, nodes, InLoop.NO)[0]

    def changed(values: Sequence[Atom]) -> list[Atom]:
        """All carries, of these that the body changes."""
        found = list(given.init)
        for n, value in zip(changing, values):
            found[n] = value
        return found

    # Each carry starts in a buffer of its own, so that it can be updated in place.
    first = [condition(given.init, out), *(given.init[n] for n in changing)]
    init = [writer.write(jnp.copy, [a], scope, out)[0] for a in first]
    carry_in = [jex.Var(v.aval) for v in init]
    writer.record_carries(carry_in, init)
    body: list[Node] = []
    args = [*given.body_consts, *changed(carry_in[1:])]
    results = writer.write_jaxpr(eqn.params["body_jaxpr"], args, scope, body, InLoop.NO)
    results = [results[n] for n in changing]
    results.insert(0, condition(changed(results), body))
    invariant, varying = split_invariant(prune(body, results), carry_in)
    out += invariant
    carry_out = writer.own_results(results, scope, varying)
    carries = [jex.Var(v.aval) for v in init]
    writer.record_carries(carries, init)
    out.append(
        While(
            body=tuple(varying),
            init=tuple(init),
            carry_in=tuple(carry_in),
            carry_out=tuple(carry_out),
            carries=tuple(carries),
            sources={v: writer.layout_of[v] for v in init if v in writer.layout_of},
        )
    )
    return changed(carries[1:])


def write_cond_as_whiles(writer: Writer, eqn: Any, scope: str, out: list[Node]) -> Sequence[Atom]:
    """Writes a cond whose branches hold whiles of several tasks: each as a while that runs once or never."""
    return write_traced(writer, functools.partial(_one_after_the_other, eqn), eqn.invars, scope, out)


def write_traced(
    writer: Writer, fun: Any, atoms: Sequence[Atom], scope: str, out: list[Node]
) -> Sequence[Atom]:
    """Writes what an equation that is in no loop comes to; its results."""
    args = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    return writer.write_jaxpr(jax.make_jaxpr(fun)(*args), atoms, scope, out, InLoop.NO)


def _passed_on(eqn: Any) -> set[int]:
    """The numbers of the carries that the body returns as they are."""
    invars, outvars, _, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])
    carried = invars[eqn.params["body_nconsts"] :]
    return {n for n, (enters, leaves) in enumerate(zip(carried, outvars)) if enters is leaves}


def _of_one_condition(eqn: Any, *args: jax.Array) -> list[jax.Array]:
    """A while under `vmap`, which goes on until no example does."""
    given = _Operands.of(eqn, args)

    def condition(carry: Sequence[jax.Array]) -> jax.Array:
        return jex.jaxpr_as_fun(eqn.params["cond_jaxpr"])(*given.cond_consts, *carry)[0]

    def body(carry: Sequence[jax.Array]) -> list[jax.Array]:
        goes_on = condition(carry)
        made = jex.jaxpr_as_fun(eqn.params["body_jaxpr"])(*given.body_consts, *carry)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(goes_on.reshape(goes_on.shape + (1,) * (new.ndim - goes_on.ndim)), new, old)

        return list(map(chosen, made, carry))

    return jax.lax.while_loop(lambda carry: jnp.any(condition(carry)), body, given.init)


def _one_after_the_other(eqn: Any, index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """A cond as a while for each branch, which runs once or never."""
    results = [jnp.zeros_like(v.aval) for v in eqn.outvars]
    for n, branch in enumerate(eqn.params["branches"]):
        run = functools.partial(_run_once, jex.jaxpr_as_fun(branch), operands)
        _, results = jax.lax.while_loop(lambda carry: carry[0], run, (jnp.asarray(index == n), results))
    return results


def _run_once(fun: Callable[..., Any], operands: Sequence[jax.Array], carry: Any) -> tuple[jax.Array, Any]:
    """A body after which there is no iteration."""
    return jnp.zeros_like(carry[0]), fun(*operands)
