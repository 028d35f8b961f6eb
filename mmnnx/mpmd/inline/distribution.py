"""Loop distribution: the body of a scan over several tasks is divided into scans over one task each.

That can be done where nothing flows back from one task to another: what the iterations of one scan hand to
those of the next is then stacked in between. (Kuck et al. 1981, "Dependence graphs and compiler
optimizations": the strongly connected components of the dependences between iterations stay together.) The
branches of a cond are divided in the same way, which can always be done.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.inline.strongly_connected import strongly_connected_components
from mmnnx.mpmd.ir.equations import Equation, Var, is_var, nbytes


@dataclasses.dataclass(frozen=True)
class Part:
    """The body of one of the scans, or of one of the conds.

    Attributes:
      mesh: the mesh that it is placed on, None where any will do.
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
    pinned_mesh: Callable[[Equation], Mesh | None],
    available_on: Callable[[Var], Sequence[Mesh]],
) -> list[Part] | None:
    """Divides the body of a scan, or all branches of a cond.

    Args:
      nodes: their equations, in order; each of `carry_out` is made by one of them.
      carry_in, carry_out: variables, the carries before and after an iteration.
      pinned_mesh: the mesh that an equation must be on, if any.
      available_on: the meshes that have a variable from outside; none if that is not known.

    Returns:
      The parts, each after those that it takes something from; None if work of two meshes depends on each
      other from iteration to iteration.
    """
    graph = _Graph.of(nodes, carry_in, carry_out)
    meshes = _first_meshes(graph, pinned_mesh, available_on)
    if meshes is None:
        return None
    _move_to_readers(graph, meshes, pinned_mesh, available_on)
    return [_part(graph, part, mesh, carry_in) for part, mesh in _grouped(graph, meshes)]


@dataclasses.dataclass(frozen=True)
class _Graph:
    """The dependences between equations, across iterations too.

    Attributes:
      nodes: the equations.
      reads: for each equation, the variables that it reads.
      maker: of each variable, the number of the equation that makes it; of a carry, in the iteration before.
      components: numbers of equations that depend on each other, each after those that it needs.
      component_of: of each equation, the number of its component.
      needs: for each component, those that it reads from.
    """

    nodes: Sequence[Equation]
    reads: list[list[Var]]
    maker: dict[Var, int]
    components: list[list[int]]
    component_of: dict[int, int]
    needs: list[set[int]]

    @classmethod
    def of(cls, nodes: Sequence[Equation], carry_in: Sequence[Var], carry_out: Sequence[Var]) -> _Graph:
        maker = {v: n for n, node in enumerate(nodes) for v in node.outvars}
        maker |= {v: maker[out] for v, out in zip(carry_in, carry_out)}
        reads = [list(filter(is_var, node.invars)) for node in nodes]
        components = strongly_connected_components([{maker[a] for a in r if a in maker} for r in reads])
        component_of = {n: c for c, component in enumerate(components) for n in component}
        needs = [
            {component_of[maker[a]] for n in component for a in reads[n] if a in maker} - {c}
            for c, component in enumerate(components)
        ]
        return cls(nodes, reads, maker, components, component_of, needs)

    def inside(self, component: Sequence[int]) -> list[Var]:
        """What a component reads that these equations make."""
        return list(dict.fromkeys(a for n in component for a in self.reads[n] if a in self.maker))

    def outside(self, component: Sequence[int]) -> list[Var]:
        """What a component reads from elsewhere."""
        return [a for n in component for a in self.reads[n] if a not in self.maker]

    def maker_component(self, v: Var) -> int:
        """The component that makes a variable."""
        return self.component_of[self.maker[v]]


def _choices(
    graph: _Graph, component: Sequence[int], available_on: Callable[[Var], Sequence[Mesh]]
) -> list[Mesh]:
    """The meshes that have all that a component reads from elsewhere, as far as is known of it."""
    known = [meshes for a in graph.outside(component) if (meshes := available_on(a))]
    return [mesh for mesh in (known[0] if known else ()) if all(mesh in meshes for meshes in known)]


def _first_meshes(
    graph: _Graph,
    pinned_mesh: Callable[[Equation], Mesh | None],
    available_on: Callable[[Var], Sequence[Mesh]],
) -> list[Mesh | None] | None:
    """For each component the mesh that it is pinned to; else the one with most bytes of what it reads.

    Of meshes with equally many, that which the flow of values reaches later. None in place of all if a
    component is pinned to several.
    """
    meshes: list[Mesh | None] = []
    moves: list[int] = []  # how often the flow has changed mesh on its way to a component
    for c, component in enumerate(graph.components):
        pinned = {mesh for n in component if (mesh := pinned_mesh(graph.nodes[n])) is not None}
        if len(pinned) > 1:
            return None
        choices = _choices(graph, component, available_on)
        weight: Counter[Mesh] = Counter()  # bytes of what it reads, by mesh
        reached: dict[Mesh, int] = {}
        for a in graph.inside(component):
            b = graph.maker_component(a)
            if b != c and (there := meshes[b]) is not None:
                weight[there] += nbytes(a)
                reached[there] = max(reached.get(there, 0), moves[b])
        heaviest = max(weight, key=lambda mesh: (weight[mesh], reached[mesh]), default=None)
        mesh = pinned.pop() if pinned else heaviest if heaviest in choices or not choices else choices[0]
        meshes.append(mesh)
        moves.append(max((moves[b] + (meshes[b] not in (None, mesh)) for b in graph.needs[c]), default=0))
    return meshes


def _move_to_readers(
    graph: _Graph,
    meshes: list[Mesh | None],
    pinned_mesh: Callable[[Equation], Mesh | None],
    available_on: Callable[[Var], Sequence[Mesh]],
) -> None:
    """Moves single equations that nothing pins to the mesh that reads them, if less is sent then."""
    readers: list[set[int]] = [set() for _ in graph.components]
    for c, needs in enumerate(graph.needs):
        for b in needs:
            readers[b].add(c)
    for c in reversed(range(len(graph.components))):
        component, targets = graph.components[c], {meshes[reader] for reader in readers[c]}
        node = graph.nodes[component[0]]
        free = len(component) == 1 and pinned_mesh(node) is None
        if not free or len(targets) != 1 or _choices(graph, component, available_on):
            continue
        target = targets.pop()
        read = graph.inside(component)
        sent = [a for a in read if meshes[graph.maker_component(a)] not in (None, target)]
        if meshes[c] is None or sum(map(nbytes, node.outvars)) > sum(map(nbytes, sent)):
            meshes[c] = target


def _grouped(graph: _Graph, meshes: Sequence[Mesh | None]) -> list[tuple[list[int], Mesh | None]]:
    """(numbers of equations, mesh) of each part: what is on one mesh together, as far as others allow."""
    parts: list[tuple[list[int], Mesh | None]] = []
    left = list(range(len(graph.components)))
    done: set[int] = set()
    while left:
        ready: dict[Mesh | None, set[int]] = {}
        for mesh in dict.fromkeys(meshes[c] for c in left):
            found = ready[mesh] = set()
            for c in left:  # in order: what a component needs is in front of it
                if meshes[c] == mesh and graph.needs[c] <= done | found:
                    found.add(c)
        # Greedy: the mesh with the fewest components that still wait, so that few meshes need a second part.
        waiting = Counter(meshes[c] for c in left)
        mesh = min((m for m in ready if ready[m]), key=lambda m: waiting[m] - len(ready[m]))
        done |= ready[mesh]
        left = [c for c in left if c not in done]
        parts.append((sorted(n for c in ready[mesh] for n in graph.components[c]), mesh))
    return parts


def _part(graph: _Graph, numbers: list[int], mesh: Mesh | None, carry_in: Sequence[Var]) -> Part:
    own = set(numbers)
    mine = {v for v, n in graph.maker.items() if n in own}
    takes = [a for a in graph.inside(numbers) if a not in mine]
    read = (a for n, atoms in enumerate(graph.reads) if n not in own for a in atoms if a in mine)
    carries = [i for i, v in enumerate(carry_in) if v in mine]
    return Part(mesh, [graph.nodes[n] for n in numbers], carries, takes, list(dict.fromkeys(read)))
