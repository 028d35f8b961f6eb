"""Constant PRNG keys, made of literals alone, are computed before a program runs and become inputs of it.

`nnx.Rngs(0)` in a function that makes a model gives each parameter a key of its own, counted from the first.
With the keys as inputs, stages that initialise equal layers are equal, and XLA compiles one of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.ir.equality import equation_key
from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call, Instruction
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.rewrite import trace_equations

_KEY_WORDS = 256  # larger arrays of integers are not taken for keys; 128 raw keys have as many words


def extract_constant_keys(program: Program) -> tuple[Program, list[Any]]:
    """Computes the constant keys of fragments that run once, and makes them inputs.

    Returns:
      The program with the keys as inputs, after those that it has; and their values.
    """
    times = Counter(c.fragment for c in program.calls)
    once = {f for f, n in times.items() if n == 1 and f.scan is None} - program.repeated
    made: dict[Any, list[Any]] = {}
    inputs, values, keys = dict(program.inputs), list(program.values), []
    instructions: list[Instruction] = []
    for i in program.instructions:
        if isinstance(i, Call) and i.fragment in once and (wanted := _constant_keys(i.fragment)):
            keys += _evaluate(i.fragment.jaxpr.eqns, wanted, made)
            f = _with_inputs(i.fragment, wanted)
            buffers = tuple(range(len(values), len(values) + len(wanted)))
            values += [(v, f.mesh) for v in f.invars[-len(wanted) :]]
            inputs |= {s: values[s] for s in buffers}
            i = i._replace(fragment=f, inputs=(*i.inputs, *buffers), frees=(*i.frees, *buffers))
        instructions.append(i)
    given = dataclasses.replace(
        program, instructions=tuple(instructions), inputs=inputs, values=tuple(values), loops=()
    )
    return given, keys


def is_of_keys(v: Var) -> bool:
    """Whether it holds keys, or what keys are made of: a seed, a counter, the words of raw keys."""
    return _is_key(v) or (jnp.issubdtype(v.aval.dtype, jnp.integer) and v.aval.size <= _KEY_WORDS)


def is_draw(e: Any) -> bool:
    return e.primitive.name == "random_bits"


def _makes_keys(e: Any) -> bool:
    impure = e.effects or "callback" in e.primitive.name  # which may return something else in every call
    return not impure and not is_draw(e) and all(map(is_of_keys, e.outvars))


def _is_key(v: Var) -> bool:
    return jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _constant_keys(f: Fragment) -> list[Var]:
    """The constant keys that something else is made of, or that are results; with these, their counters."""
    of_nothing: set[Var] = set()
    wanted: dict[Var, None] = {}
    for e in f.jaxpr.eqns:
        reads = [a for a in e.invars if is_var(a)]
        if of_nothing.issuperset(reads) and _makes_keys(e):
            of_nothing.update(e.outvars)
        else:
            wanted |= dict.fromkeys(v for v in reads if v in of_nothing and _is_key(v))
    kept = dict.fromkeys(v for v in f.outvars if v in of_nothing)
    return [*(wanted | kept)] if any(map(_is_key, (*wanted, *kept))) else []


def _needed(eqns: Sequence[Any], wanted: Iterable[Var]) -> list[Any]:
    """The equations that make these, and those that have effects."""
    live, needed = {*wanted}, []
    for e in reversed(eqns):
        if e.effects or not live.isdisjoint(e.outvars):
            needed.append(e)
            live.update(a for a in e.invars if is_var(a))
    return needed[::-1]


def _evaluate(eqns: Sequence[Any], wanted: Sequence[Var], made: dict[Any, list[Any]]) -> list[Any]:
    """The values of variables. `made` caches results of equations: all stages count keys from the first."""
    env: dict[Var, Any] = {}
    with _compat.asked_transfers(), jax.ensure_compile_time_eval():
        for e in _needed([e for e in eqns if not e.effects], wanted):
            reads = [a for a in e.invars if is_var(a)]
            key: Any = tuple(id(env[v]) for v in reads)
            try:
                key = equation_key(e), key
            except TypeError:  # it holds what cannot be hashed
                key = id(e), key
            if key not in made:
                takes = list(dict.fromkeys(reads))
                alone = _compat.close_jaxpr(takes, e.outvars, [e])
                made[key] = jex.jaxpr_as_fun(alone)(*(env[v] for v in takes))
            env |= zip(e.outvars, made[key])
    return [env[v] for v in wanted]


def _with_inputs(f: Fragment, wanted: Sequence[Var]) -> Fragment:
    """A fragment that takes these instead of making them. Results are copied: none may be an input."""
    # What makes one of them may be needed for something else that it makes.
    unread = {v: jex.Var(v.aval) for v in wanted}
    eqns = [e.replace(outvars=[unread.get(v, v) for v in e.outvars]) for e in f.jaxpr.eqns]
    taken = {v: jex.Var(v.aval) if v in f.outvars else v for v in wanted}
    copies = [
        e.eqn.replace(outvars=[v])
        for v, given in taken.items()
        if given is not v
        for e in trace_equations(jnp.copy, given, scope="")[0]
    ]
    invars = (*f.invars, *taken.values())
    jaxpr = _compat.close_jaxpr(invars, f.outvars, [*copies, *_needed(eqns, f.outvars)])
    return dataclasses.replace(f, jaxpr=jaxpr, invars=invars)
