"""Which values a forward keeps for its backward, and which the backward computes again.

JAX's linearisation keeps every factor of every derivative: for `relu(x @ w)` the product's mask and its
positive part, for a norm half a dozen arrays. Most are cheap functions of a few. Between what a forward has
and what its backward reads, a minimum cut finds the fewest bytes to keep if elementwise work may be redone
(as in Wang et al. 2023, "Min-cut rematerialization" of AOTAutograd). Products, convolutions, loops and random
bits are never redone.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmnnx import _compat
from mmnnx.mpmd.cut import sink_side
from mmnnx.mpmd.place import Placement, Spot
from mmnnx.mpmd.trace import LAYOUT, Kind, Loop, Node, Var, is_var, nbytes

_CHEAP = LAYOUT | {
    "abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "cos", "custom_jvp_call",
    "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite",
    "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not",
    "one_minus_square", "or", "pow", "reduce_max", "reduce_min", "reduce_sum", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip


def recomputed(nodes: Sequence[Node], placement: Placement) -> set[Node]:
    """Forward equations that the backward of the same position repeats instead of reading their results."""
    found: set[Node] = set()
    maker = {v: n for n in nodes for v in n.outvars}
    forward: dict[Spot, set[Node]] = {}
    needed: dict[Spot, dict[Var, None]] = {}
    for node in nodes:
        spot = placement.spots.get(node)
        if spot is None or spot.position is None:
            continue
        if placement.phases[node] == "forward":
            forward.setdefault(spot, set()).add(node)
        elif placement.phases[node] == "backward":
            for a in node.invars:
                if is_var(a) and maker.get(a) in forward.get(spot, ()):
                    needed.setdefault(spot, {})[a] = None
    for spot, values in needed.items():
        found |= _between(forward[spot], list(values), maker, placement)
    return found


def _between(
    forward: set[Node], needed: Sequence[Var], maker: dict[Var, Node], placement: Placement
) -> set[Node]:
    number: dict[Var, int] = {}
    edges: list[tuple[int, int, int]] = [(0, 1, 0)]

    def enter(v: Var) -> int:
        """The node at which a value comes about; it is kept if the edge from there to the next is cut."""
        if v not in number:
            number[v] = 2 + 2 * len(number)
            edges.append((number[v], number[v] + 1, nbytes(v)))
            queue.append(v)
        return number[v]

    queue: list[Var] = []
    for v in needed:
        edges.append((enter(v) + 1, 1, -1))
    while queue:
        v = queue.pop()
        node = maker.get(v)
        if node not in forward or not _cheap(node):
            edges.append((0, number[v], -1))
            continue
        for a in node.invars:
            if is_var(a) and placement.where[a].kind is Kind.ACTIVATION:
                edges.append((enter(a) + 1, number[v], -1))
    beyond = sink_side(2 + 2 * len(number), edges)
    return {maker[v] for v, n in number.items() if n in beyond}


def _cheap(node: Node) -> bool:
    if isinstance(node, Loop) or node.name not in _CHEAP:
        return False
    return all(_cheap_inside(jaxpr) for jaxpr in _compat.subjaxprs(node.eqn))


def _cheap_inside(jaxpr: object) -> bool:
    eqns = _compat.open_jaxpr(jaxpr)[2]
    return all(e.primitive.name in _CHEAP and all(map(_cheap_inside, _compat.subjaxprs(e))) for e in eqns)
