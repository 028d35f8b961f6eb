"""Loop distribution: the body of a scan over several tasks is divided into scans over one task each.

That can be done where nothing flows back from one task to another: what the iterations of one scan hand to
those of the next is then stacked up in between. (Kuck et al. 1981, "Dependence graphs and compiler
optimizations"; the strongly connected parts of the dependences between iterations stay together.) The
branches of a cond are divided the same way, and that always goes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Var, is_var, nbytes


@dataclasses.dataclass(frozen=True)
class Part:
    """The body of one of the scans, or of one of the conds.

    Attributes:
      mesh: where it is tied to, None where it is tied to nothing.
      nodes: its equations, in order.
      carries: numbers of the carries that it updates.
      takes: variables that a part before it makes, or carries, one value for each iteration.
      gives: variables of its own that other parts take.
    """

    mesh: Mesh | None
    nodes: list[Equation]
    carries: list[int]
    takes: list[Var]
    gives: list[Var]


def distribute(
    nodes: Sequence[Equation],
    carry_in: Sequence[Var],
    carry_out: Sequence[Var],
    tie: Callable[[Equation], Mesh | None],
    near: Callable[[Var], Sequence[Mesh]],
) -> list[Part] | None:
    """Divides the body of a scan, or all branches of a cond.

    Args:
      nodes: their equations, in order; each of `carry_out` is made by one of them.
      carry_in, carry_out: variables, the carries before and after an iteration.
      tie: the mesh that an equation is tied to, if any.
      near: the meshes that have a variable from outside at hand; none if that is not known.

    Returns:
      The parts, each after those that it takes something from; None if work of two meshes depends on each
      other from iteration to iteration.
    """
    maker = {v: n for n, node in enumerate(nodes) for v in node.outvars}
    made_by = maker | {v: maker[out] for v, out in zip(carry_in, carry_out)}  # through the iteration before
    operands = [list(filter(is_var, node.invars)) for node in nodes]
    knots = _knots([{made_by[a] for a in atoms if a in made_by} for atoms in operands])
    of = {n: k for k, knot in enumerate(knots) for n in knot}
    before = [
        {of[made_by[a]] for n in knot for a in operands[n] if a in made_by} - {k}
        for k, knot in enumerate(knots)
    ]
    meshes = _meshes(nodes, operands, made_by, knots, before, tie, near)
    if meshes is None:
        return None
    parts = _grouped(knots, before, meshes)
    return [_part(part, mesh, nodes, operands, made_by, carry_in, carry_out) for part, mesh in parts]


def _knots(needs: Sequence[Collection[int]]) -> list[list[int]]:
    """The strongly connected components of a graph, each after those that it needs (Tarjan 1972)."""
    found: list[list[int]] = []
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(needs)):
        if root in number:
            continue
        path = [(root, iter(needs[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while path:
            n, left = path[-1]
            following = next(left, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[n])
                if low[n] == number[n]:
                    at = stack.index(n)
                    found.append(sorted(stack[at:]))
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
            elif following not in number:
                number[following] = low[following] = len(number)
                stack.append(following)
                on_stack.add(following)
                path.append((following, iter(needs[following])))
            elif following in on_stack:
                low[n] = min(low[n], number[following])
    return found


def _meshes(
    nodes: Sequence[Equation],
    operands: Sequence[Sequence[Var]],
    made_by: dict[Var, int],
    knots: Sequence[list[int]],
    before: Sequence[set[int]],
    tie: Callable[[Equation], Mesh | None],
    near: Callable[[Var], Sequence[Mesh]],
) -> list[Mesh | None] | None:
    """For each knot the mesh it is tied to; else one that has most of what it reads, later in the flow."""
    of = {n: k for k, knot in enumerate(knots) for n in knot}
    meshes: list[Mesh | None] = []
    moves: list[int] = []  # how often the flow has moved on until here
    loose: set[int] = set()  # single equations that nothing ties down
    after: list[set[int]] = [set() for _ in knots]
    for k, knot in enumerate(knots):
        for b in before[k]:
            after[b].add(k)
        tied = {mesh for n in knot if (mesh := tie(nodes[n])) is not None}
        if len(tied) > 1:
            return None
        close = [found for n in knot for a in operands[n] if a not in made_by and (found := near(a))]
        choices = [mesh for mesh in (close[0] if close else ()) if all(mesh in found for found in close)]
        weight: Counter[Mesh] = Counter()  # of what it reads, by mesh
        reached: dict[Mesh, int] = {}
        for a in dict.fromkeys(a for n in knot for a in operands[n] if a in made_by):
            b = of[made_by[a]]
            if b != k and (there := meshes[b]) is not None:
                weight[there] += nbytes(a)
                reached[there] = max(reached.get(there, 0), moves[b])
        latest = max(weight, key=lambda mesh: (weight[mesh], reached[mesh]), default=None)
        loose.update([k] if len(knot) == 1 and not tied and not choices else [])
        mesh = tied.pop() if tied else latest if latest in choices or not choices else choices[0]
        meshes.append(mesh)
        moves.append(max((moves[b] + (meshes[b] not in (None, mesh)) for b in before[k]), default=0))
    for k in reversed(range(len(knots))):  # what is made of smaller values is made where it is read
        readers = {meshes[a] for a in after[k]}
        if k not in loose or len(readers) != 1:
            continue
        mesh = readers.pop()
        inside = {a for a in operands[knots[k][0]] if a in made_by}
        sent = [a for a in inside if meshes[of[made_by[a]]] not in (None, mesh)]
        if meshes[k] is None or sum(map(nbytes, nodes[knots[k][0]].outvars)) > sum(map(nbytes, sent)):
            meshes[k] = mesh
    return meshes


def _grouped(
    knots: Sequence[list[int]], before: Sequence[set[int]], meshes: Sequence[Mesh | None]
) -> list[tuple[list[int], Mesh | None]]:
    """Puts together what is on one mesh, as far as what is on others allows."""
    parts: list[tuple[list[int], Mesh | None]] = []
    left = list(range(len(knots)))
    done: set[int] = set()
    while left:
        ready: dict[Mesh | None, set[int]] = {}
        for mesh in dict.fromkeys(meshes[k] for k in left):
            found = ready[mesh] = set()
            for k in left:  # in order: what a knot needs is in front of it
                if meshes[k] == mesh and before[k] <= done | found:
                    found.add(k)
        # The mesh of which least must wait for a later part; none comes twice that need not.
        waiting = Counter(meshes[k] for k in left)
        mesh = min((m for m in ready if ready[m]), key=lambda m: waiting[m] - len(ready[m]))
        done |= ready[mesh]
        left = [k for k in left if k not in done]
        parts.append((sorted(n for k in ready[mesh] for n in knots[k]), mesh))
    return parts


def _part(
    part: list[int],
    mesh: Mesh | None,
    nodes: Sequence[Equation],
    operands: Sequence[Sequence[Var]],
    made_by: dict[Var, int],
    carry_in: Sequence[Var],
    carry_out: Sequence[Var],
) -> Part:
    own = set(part)
    mine = {v for v, n in made_by.items() if n in own}
    taken = dict.fromkeys(a for n in part for a in operands[n] if a in made_by and a not in mine)
    given = dict.fromkeys(a for n, atoms in enumerate(operands) if n not in own for a in atoms if a in mine)
    carries = [i for i, v in enumerate(carry_in) if v in mine]
    return Part(mesh, [nodes[n] for n in part], carries, list(taken), list(given))
