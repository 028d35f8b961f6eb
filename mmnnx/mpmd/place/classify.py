"""What an equation is in a training step: part of the forward, of the backward, or of what comes after."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from mmnnx.mpmd.ir.equations import Equation, Node, Var, is_var
from mmnnx.sharding.name_stack import is_backward


class Role(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # what depends on a backward or a loop, such as an optimizer
    LOOP = "loop"


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of the nodes of a function, or of the body of a loop.

    Attributes:
      of: by node, in order.
      inner: the backward of a gradient that is itself differentiated; it is part of the outer forward.
      after_inner: these and all that depend on them, such as weights after a step of an inner optimizer.
      for_updates: what only updates read, directly or through others of these; it is no part of the flow.
    """

    of: Mapping[Node, Role]
    inner: set[Node]
    after_inner: set[Node]
    for_updates: set[Node]

    def all(self, kind: Role) -> list[Equation]:
        """The equations of a class."""
        return [n for n, c in self.of.items() if c is kind and isinstance(n, Equation)]

    def is_backward(self, e: Equation) -> bool:
        """Whether an equation is part of the backward that is not part of a forward."""
        return is_backward(e.scope) and e not in self.inner


def classify(nodes: Sequence[Node], users: Mapping[Var, Sequence[Node]]) -> Roles:
    """Finds the roles of nodes, whose results are read by these users."""
    inner, after_inner = _inner(nodes)
    after: set[Var] = set()
    of: dict[Node, Role] = {}
    for n in nodes:
        depends = not after.isdisjoint(filter(is_var, n.invars))
        if not isinstance(n, Equation):
            of[n] = Role.LOOP
        elif is_backward(n.scope) and n not in inner and (depends or "rematted_computation" not in n.scope):
            of[n] = Role.BACKWARD
        else:
            of[n] = Role.UPDATE if depends else Role.FORWARD
        if of[n] is not Role.FORWARD:
            after.update(n.outvars)
    for_updates: set[Node] = set()
    for n in reversed(nodes):
        readers = [u for v in n.outvars for u in users.get(v, ())]
        if readers and all(u in for_updates or of[u] is Role.UPDATE for u in readers):
            for_updates.add(n)
    return Roles(of, inner, after_inner, for_updates)


def _inner(nodes: Sequence[Node]) -> tuple[set[Node], set[Node]]:
    """`inner` and `after_inner` of `Roles`."""
    read: set[Var] = set()  # by the backward of an outermost derivative
    derived: set[Node] = set()
    for n in reversed(nodes):
        outermost = isinstance(n, Equation) and is_backward(n.scope, outermost=True)
        if outermost or not read.isdisjoint(n.outvars):
            derived.add(n)
            read.update(filter(is_var, n.invars))
    inner: set[Node] = set()
    after: set[Node] = set()
    values: set[Var] = set()
    for n in nodes:
        depends = not values.isdisjoint(filter(is_var, n.invars))
        within = isinstance(n, Equation) and is_backward(n.scope) and not is_backward(n.scope, True)
        if within and (depends or n in derived):
            inner.add(n)
        if depends or n in inner:
            after.add(n)
            values.update(n.outvars)
    return inner, after
