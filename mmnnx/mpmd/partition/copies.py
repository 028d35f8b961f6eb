"""Which equations are done once, and which again in every fragment that reads their results.

Work that depends on no placed state is repeated where it is read. What costs more to compute than to keep
(random bits, products) is done once on each mesh. What only lays out state anew is repeated as well, and in
a loop all cheap work over state: what it makes there takes more memory than the state
(`inline/loop_invariants.py`). But a slice of state that goes to another mesh is made once, and sent. Masks,
indices and the like that are made of state and that another mesh reads are repeated if what they are made of
has fewer bytes: that is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import (
    LAYOUT,
    PRODUCTS,
    REMAT,
    Equation,
    Node,
    Var,
    is_cheap,
    is_repeated,
    is_var,
    nbytes,
)
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.partition.fewest_bytes import computed_again

# Worth doing once and keeping, even where the inputs are at hand everywhere.
_COSTLY = {
    *PRODUCTS, "random_bits", "threefry2x32", "rng_bit_generator", "sort", "scan", "while", "cond", "cumsum",
    "cumprod", "cumlogsumexp", "cummax", "cummin", "reduce_window_sum", "top_k", "fft", "cholesky", "eigh",
    "svd", "qr", "lu", "triangular_solve", "shard_map", REMAT,
}  # fmt: skip
_SMALL = 1024  # bytes: results of no more are made again where they are read, whatever that costs


class Copies:
    """Tells the equations of one list of nodes that are copied.

    Args:
      nodes: all nodes, in order.
      placement: where they are.
      required: the results, which are made once.
      in_loop: whether the nodes are the body of a loop: what that reads from outside is sent before, once.
    """

    def __init__(self, nodes: Sequence[Node], placement: Placement, required: Iterable[Var], in_loop: bool):
        self.placement = placement
        self._in_loop = in_loop
        self.maker: Mapping[Var, Node] = {v: n for n in nodes for v in n.outvars}
        self._index = {n: i for i, n in enumerate(nodes)}
        self._once = self._done_once(nodes, set(required))
        if not in_loop:
            self._once |= self._sent_slices(nodes)
        self._made_where_read = self._of_fewer_bytes(nodes)

    def is_copied(self, node: Equation) -> bool:
        """Whether an equation is repeated in every fragment that reads it."""
        if node in self._once:
            return False
        if node not in self.placement.locations or _expands(node) or node in self._made_where_read:
            return True
        if self.placement.where[node.outvars[0]].kind is not Kind.STATE:
            return False
        return is_cheap(node) if self._in_loop else node.name in LAYOUT

    def with_copies(self, own: Sequence[Equation]) -> list[Equation]:
        """The equations of a fragment, in order, with copies of those that they need."""
        present = {v for n in own for v in n.outvars}
        needed, pending = set(own), list(own)
        while pending:
            for a in pending.pop().invars:
                maker = self.maker.get(a) if is_var(a) and a not in present else None
                if isinstance(maker, Equation) and maker not in needed and self.is_copied(maker):
                    needed.add(maker)
                    pending.append(maker)
        return sorted(needed, key=self._index.__getitem__)

    def _done_once(self, nodes: Sequence[Node], results: set[Var]) -> set[Node]:
        """Equations that are never copied: results, what loops read, and costly work that has no place."""
        for node in nodes:
            if not isinstance(node, Equation):
                results.update(filter(is_var, node.invars))
        once: set[Node] = set()
        for node in nodes:
            if not isinstance(node, Equation):
                continue
            large = sum(map(nbytes, node.outvars)) > _SMALL
            derived = any(self.maker.get(a) in once for a in node.invars if is_var(a)) and not _expands(node)
            costly = node not in self.placement.locations and large and (node.name in _COSTLY or derived)
            if costly or node.kept or results & set(node.outvars) or node.eqn.effects:
                once.add(node)
        return once

    def _sent_slices(self, nodes: Sequence[Node]) -> set[Node]:
        """Slices of state that another mesh reads: it is sent them, and not all of the state."""
        found: set[Node] = set()
        readers: dict[Var, set[Mesh]] = {}
        for node in reversed(nodes):
            if not isinstance(node, Equation):
                continue
            location = self.placement.locations.get(node)
            there = {mesh for v in node.outvars for mesh in readers.get(v, ())}
            is_state = any(self.placement.where[v].kind is Kind.STATE for v in node.outvars)
            if location is not None and is_state and node.name == "slice" and there - {location.mesh}:
                found.add(node)
            if location is not None and (not is_state or node in found):
                there = {location.mesh}
            for v in filter(is_var, node.invars):
                readers.setdefault(v, set()).update(there)
        return found

    def _of_fewer_bytes(self, nodes: Sequence[Node]) -> set[Node]:
        """Equations over state that are repeated on meshes where it does not live, so that the fewest bytes
        are sent there."""
        where = self.placement.where
        needed: list[Var] = []
        for node in nodes:
            if (location := self.placement.locations.get(node)) is not None:
                needed += [a for a in self._state(node) if where[a].home != location.mesh]

        def made_of(v: Var) -> list[Var] | None:
            maker = self.maker.get(v)
            if isinstance(maker, Equation) and maker not in self._once and is_repeated(maker):
                return self._state(maker)
            return None

        return {self.maker[v] for v in computed_again(needed, made_of)}

    def _state(self, node: Node) -> list[Var]:
        """What an equation reads that is made of nothing but state."""
        return [a for a in node.invars if is_var(a) and self.placement.where[a].kind is Kind.STATE]


def _expands(node: Equation) -> bool:
    """Whether an equation only spreads a smaller value, so that it is cheaper redone than kept."""
    return node.name == "broadcast_in_dim" and sum(map(nbytes, node.invars)) < sum(map(nbytes, node.outvars))
