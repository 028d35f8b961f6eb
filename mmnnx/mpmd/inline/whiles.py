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

from mmnnx.mpmd.inline.loop_invariants import split_invariant
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Node, While
from mmnnx.mpmd.ir.rewrite import prune


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A while equation taken apart, over some operands.

    Attributes:
      cond, body: jaxprs.
      cond_consts, body_consts: their constants.
      init: the carries.
    """

    cond: Any
    body: Any
    cond_consts: list[Any]
    body_consts: list[Any]
    init: list[Any]

    @classmethod
    def of(cls, eqn: Any, args: Sequence[Any]) -> _Parts:
        """Those of an equation, over these operands."""
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        bodies = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        return cls(*bodies, list(args[:first]), list(args[first:second]), list(args[second:]))


def write_while(writer: Writer, eqn: Any, scope: str, out: list[Node]) -> Sequence[Atom]:
    """Writes a while of several tasks as a While; its results in the list.

    What the body hands on as it is, such as the weights of a model, JAX has made a constant of it.
    """
    loop = _Parts.of(eqn, eqn.invars)
    if loop.cond.out_avals[0].shape:
        return _write_traced(writer, functools.partial(_of_one_condition, eqn), eqn.invars, scope, out)

    def condition(carries: Sequence[Atom], nodes: list[Node]) -> list[Atom]:
        return writer.write_jaxpr(loop.cond, [*loop.cond_consts, *carries], scope, nodes, InLoop.NO)

    # Each carry starts in a buffer of its own, so that it can be updated in place.
    first = [*condition(loop.init, out), *loop.init]
    init = [writer.write(jnp.copy, [a], scope, out)[0] for a in first]
    carry_in = [jex.Var(v.aval) for v in init]
    writer.record_carries(carry_in, init)
    body: list[Node] = []
    made = writer.write_jaxpr(loop.body, [*loop.body_consts, *carry_in[1:]], scope, body, InLoop.NO)
    results = [*condition(made, body), *made]
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
    return carries[1:]


def write_cond_as_whiles(writer: Writer, eqn: Any, scope: str, out: list[Node]) -> Sequence[Atom]:
    """Writes a cond whose branches hold whiles of several tasks: each as a while that runs once or never."""
    return _write_traced(writer, functools.partial(_one_after_the_other, eqn), eqn.invars, scope, out)


def _write_traced(
    writer: Writer, fun: Callable[..., Any], atoms: Sequence[Atom], scope: str, out: list[Node]
) -> Sequence[Atom]:
    """Writes what an equation that is in no loop comes to; its results."""
    args = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    return writer.write_jaxpr(jax.make_jaxpr(fun)(*args), atoms, scope, out, InLoop.NO)


def _of_one_condition(eqn: Any, *args: jax.Array) -> list[jax.Array]:
    """A while under `vmap`, which goes on until no example does."""
    loop = _Parts.of(eqn, args)

    def condition(carry: Sequence[jax.Array]) -> jax.Array:
        return jex.jaxpr_as_fun(loop.cond)(*loop.cond_consts, *carry)[0]

    def body(carry: Sequence[jax.Array]) -> list[jax.Array]:
        goes_on = condition(carry)
        made = jex.jaxpr_as_fun(loop.body)(*loop.body_consts, *carry)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(goes_on.reshape(goes_on.shape + (1,) * (new.ndim - goes_on.ndim)), new, old)

        return list(map(chosen, made, carry))

    return jax.lax.while_loop(lambda carry: jnp.any(condition(carry)), body, loop.init)


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
