"""The backward of stacked layers in two parts: a scan from layer to layer, and one for each gradient.

The backward of a scan is one equation, and would be of the input part whole: the gradients of all its weights
come with what the stage before waits for. Divided, the first scan hands the activations' gradients from layer
to layer and keeps them, and each weight's gradient is made of what it kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import PRODUCTS, Atom, Equation, Node, Var, is_var, with_inner
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations
from mmnnx.mpmd.ir.scans import run_scan, split_operands


def split_scans(
    nodes: Sequence[Node], placement: Placement, positions: Container[int | None]
) -> tuple[list[Node], Placement]:
    """Divides the scans in the backward phase of some positions.

    Args:
      nodes: the nodes of a function or of a loop body, in order.
      placement: where they are.
      positions: the numbers of those whose backward is divided.

    Returns:
      The nodes with the new scans in their place, and where these are.
    """
    found = {n for n in nodes if can_be_split(n, placement) and placement.locations[n].position in positions}
    if not found:
        return list(nodes), placement
    placed = placement.copy()
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Equation) and node in found:
            parts = _parts(node)
            placed.put_like(parts, node)
            out += parts
        else:
            out.append(node)
    return out, placed


def can_be_split(node: Node, placement: Placement) -> bool:
    """Whether a node is a scan of a backward that makes gradients which no later iteration waits for."""
    return (
        isinstance(node, Equation)
        and node.name == "scan"
        and placement.phases.get(node) == "backward"
        and bool(_Body.of(node.eqn).gradients)
    )


@dataclasses.dataclass(frozen=True)
class _Body:
    """The body of a scan, divided.

    Attributes:
      constants, carries, slices: its inputs.
      held: constants of the body itself, with their values.
      chain: the equations that the carries, or results that are no gradients, need.
      results: the results of these: the carries, then the others.
      gradients: for results by number, the equations that make them of what the chain makes.
    """

    constants: list[Var]
    carries: list[Var]
    slices: list[Var]
    held: dict[Var, Any]
    chain: list[Any]
    results: list[Atom]
    gradients: dict[int, list[Any]]

    @classmethod
    def of(cls, eqn: Any) -> _Body:
        """The body of a scan equation; without gradients if it cannot be divided."""
        num_consts, num_carry = _compat.scan_counts(eqn.params)
        invars, outvars, eqns, held = _compat.open_jaxpr(eqn.params["jaxpr"])
        inputs = split_operands(invars, num_consts, num_carry)
        carried, ys = outvars[:num_carry], outvars[num_carry:]
        chain = _needed(eqns, carried)
        divisible = num_carry and not any(e.effects for e in eqns)
        alone = [n for n, y in enumerate(ys) if divisible and ys.count(y) == 1]
        apart = {n for n in alone if any(map(_has_product, _needed(eqns, [ys[n]], but=chain)))}
        chain = _needed(eqns, [*carried, *(y for n, y in enumerate(ys) if n not in apart)])
        made = {n: _needed(eqns, [ys[n]], but=chain) for n in sorted(apart)}
        gradients = {n: own for n, own in made.items() if own}
        others = [y for n, y in enumerate(ys) if n not in gradients]
        return cls(*inputs, dict(held), chain, [*carried, *others], gradients)


def _needed(eqns: Sequence[Any], wanted: Iterable[Atom], but: Sequence[Any] = ()) -> list[Any]:
    """The equations that make these, but for some of them and what is needed for those alone."""
    there = {v for e in but for v in e.outvars}
    live, needed = {a for a in wanted if is_var(a)} - there, []
    for e in reversed(eqns):
        if not live.isdisjoint(e.outvars):
            needed.append(e)
            live.update(a for a in e.invars if is_var(a) and a not in there)
    return needed[::-1]


def _has_product(eqn: Any) -> bool:
    return any(e.primitive.name in PRODUCTS for e in with_inner(eqn))


def _parts(node: Equation) -> list[Equation]:
    """The scans that take the place of one: the chain, which also keeps what the gradients are made of, and
    one for each gradient."""
    eqn, body = node.eqn, _Body.of(node.eqn)
    num_carry, ys = len(body.carries), node.outvars[len(body.carries) :]
    inside = _compat.open_jaxpr(eqn.params["jaxpr"])[1][num_carry:]
    outside = {*body.constants, *body.slices, *body.held}
    reads = {n: _reads(own) for n, own in body.gradients.items()}
    kept = list(dict.fromkeys(v for own in reads.values() for v in own if v not in outside))
    invars = [*body.constants, *body.carries, *body.slices]
    chain = _compat.close_jaxpr(invars, [*body.results, *kept], body.chain, body.held)
    run_chain = functools.partial(run_scan, chain, len(body.constants), num_carry, eqn.params)
    made, atoms = trace_equations(run_chain, *eqn.invars, scope=node.scope)
    others = [y for n, y in enumerate(ys) if n not in body.gradients]
    named = [*node.outvars[:num_carry], *others]
    stacks = atoms[len(named) :]
    parts = name_results(made, atoms, [*named, *stacks])
    given = dict(zip(invars, eqn.invars)) | dict(zip(kept, stacks))

    for n, own in body.gradients.items():
        whole = [v for v in reads[n] if v in body.constants]
        rows = [v for v in reads[n] if v not in body.constants and v not in body.held]
        gradient = _compat.close_jaxpr([*whole, *rows], [inside[n]], own, body.held)
        run_gradient = functools.partial(run_scan, gradient, len(whole), 0, eqn.params)
        made, atoms = trace_equations(run_gradient, *(given[v] for v in (*whole, *rows)), scope=node.scope)
        parts += name_results(made, atoms, [ys[n]])
    return parts


def _reads(eqns: Sequence[Any]) -> list[Var]:
    """What equations read of others."""
    made = {v for e in eqns for v in e.outvars}
    return list(dict.fromkeys(a for e in eqns for a in e.invars if is_var(a) and a not in made))
