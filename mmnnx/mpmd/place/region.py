"""A function, or the body of a loop, while it is placed: what is known so far."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.frontend.function import TaskOf
from mmnnx.mpmd.ir.dataflow import follow_back
from mmnnx.mpmd.ir.equations import LAYOUT, PRODUCTS, Atom, Equation, Loop, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.origin import CONST, FREE, Kind, Origin, combine
from mmnnx.mpmd.ir.placement import Location, Placement, Position, Reason
from mmnnx.mpmd.place.classify import Role, Roles, classify
from mmnnx.mpmd.place.options import fusing
from mmnnx.sharding.task import Task

_SAME_VALUES = LAYOUT | {"convert_element_type"}

Fits = Callable[[Loop, Placement], bool]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be placed: a function, or the body of a microbatch loop.

    Attributes:
      nodes: in order.
      inputs: the origin of every input, constant and outer variable.
      task_of: from a name stack to the task scope that it lies in and that task's mesh.
      follows: results whose home is that of a state variable.
      fits: whether a loop can have the schedule that it asks for, if its body is placed so.
      tasks: whose state is what, where one mesh has that of several tasks.
      replicated: scalar results that every mesh gets a copy of, such as counters.
      on_one_mesh: the other results.
      roots: for outer variables that are made of state, the state.
      microbatches: how many; None outside loops.
      batch: variables that stand for slices of the batch; outside loops, inputs that are no state.
    """

    nodes: Sequence[Node]
    inputs: dict[Var, Origin]
    task_of: TaskOf
    follows: dict[Var, Var]
    fits: Fits
    tasks: dict[Var, Task]
    replicated: frozenset[Var] = frozenset()
    on_one_mesh: frozenset[Var] = frozenset()
    roots: dict[Var, frozenset[Var]] = dataclasses.field(default_factory=dict)
    microbatches: int | None = None
    batch: Sequence[Var] = ()

    @functools.cached_property
    def maker(self) -> Mapping[Var, Node]:
        """Which node makes each variable."""
        return {v: n for n in self.nodes for v in n.outvars}

    @functools.cached_property
    def users(self) -> Mapping[Var, Sequence[Node]]:
        """Which nodes read each variable, in order."""
        users: dict[Var, list[Node]] = {}
        for node in self.nodes:
            for a in dict.fromkeys(filter(is_var, node.invars)):
                users.setdefault(a, []).append(node)
        return users

    @functools.cached_property
    def roles(self) -> Roles:
        """What each node is in a training step."""
        return classify(self.nodes, self.users)

    @functools.cached_property
    def all_follows(self) -> Mapping[Var, Var]:
        """`follows`, and the state that other values are combined with by updates."""
        updates, batch = self.roles.all(Role.UPDATE), set(self.batch)
        state = {v for v, o in self.inputs.items() if o.kind is Kind.STATE} - batch
        is_state = lambda a: a if is_var(a) and a in state else None
        found: dict[Var, Var] = {}
        # First what is combined with state: then a result may take another's place, as of a population.
        follow_back(updates, found, is_state)
        found.update(self.follows)
        follow_back(updates, found, is_state)
        return found


class Region:
    """A problem while it is solved.

    Attributes:
      returning: whether the flow goes back to state that was used before and lives elsewhere; else the state
        is sent to the flow.
      apart: whether the state of each task has positions of its own; else neighbours on a mesh share one.
      order: in which the forward is placed.
      shared: state that is sent to the flow wherever it is read.
      moving: state whose elementwise readers go wherever fewest bytes cross, and the state with them.
      by_mesh: whether minimum cuts count no bytes for what a mesh made when the flow was there before.
      renewing: whether what is combined with state after an inner gradient is taken for its next value.
      out: the placement, as far as it is known.
      maker, users: of each variable.
      roles: what each node is in a training step.
      roots: for every variable that is made of state alone, the state.
      of_batch: variables that are made of the batch alone, where that has a home.
      renewed: new values of state, and what they are made of.
      tasks: whose state is what, and whose its new values are.
      number: of these tasks, in the order of the state.
      tied: equations that stay where they are: in a task scope, or reading state.
      used_state: state that the forward has read.
      state_uses: where the forward reads state.
      read_from: for state that a flow comes to, the meshes that it comes from.
      sent: state that goes to the flow.
      readers: for each position, the tasks whose state is read there, in no scope.
      loose: forward equations that only the backward reads.
      replicated: updates of scalars that every mesh gets a copy of, which each may make itself.
      comes_back: whether a value may be read where it was made, when the flow comes there again.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        returning: bool,
        apart: bool = False,
        order: Sequence[Equation] | None = None,
        shared: frozenset[Var] = frozenset(),
        moving: frozenset[Var] = frozenset(),
        by_mesh: bool = False,
        renewing: bool = True,
    ):
        self.problem, self.nodes, self.task_of = problem, problem.nodes, problem.task_of
        self.returning, self.apart = returning, apart
        self.in_loop, self.microbatches = problem.microbatches is not None, problem.microbatches or 1
        self.fuses = fusing.get() == "all" or (fusing.get() == "loops" and self.in_loop)
        self.out = Placement()
        self.where, self.locations, self.positions = self.out.where, self.out.locations, self.out.positions
        self.where.update(problem.inputs)
        self.out.follows.update(problem.all_follows)
        self.maker, self.users, self.roles = problem.maker, problem.users, problem.roles
        self.order, self.shared, self.moving = order, shared, moving
        self.by_mesh, self.renewing = by_mesh, renewing
        self.forward = list(order or self.roles.all(Role.FORWARD))
        autodiff = self.in_loop or Role.BACKWARD in self.roles.of.values()
        self.forward_phase = "forward" if autodiff else "none"
        state = {v for v, o in problem.inputs.items() if o.kind is Kind.STATE}
        self.roots = {v: frozenset([v]) for v in state} | problem.roots
        self.of_batch = set(problem.batch)
        self.renewed: set[Var] = set()
        self.tasks = dict(problem.tasks)
        self.number = {task: n for n, task in enumerate(dict.fromkeys(problem.tasks.values()))}
        self.tied: set[Node] = set()
        self.used_state: set[Var] = set()
        self.state_uses: dict[Var, set[Location]] = {}
        self.read_from: dict[Var, set[Mesh]] = {}
        self.sent: set[Var] = set()
        self.readers: dict[int, set[Task]] = {}
        self.loose: set[Node] = set()
        self.replicated: set[Equation] = set()
        self.comes_back = False

    def origin_of(self, atom: Atom) -> Origin:
        """What an atom is made of."""
        return self.where[atom] if is_var(atom) else CONST

    def roots_of(self, e: Node) -> frozenset[Var]:
        """The state that an equation's operands of state alone are made of."""
        return frozenset().union(*(self.roots.get(a, ()) for a in e.invars if is_var(a)))

    def combines_state(self, e: Node) -> bool:
        """Whether an equation combines state with activations entry by entry, such as learned positions."""
        if not isinstance(e, Equation) or e.name in PRODUCTS or len(e.outvars) != 1 or not self.roots_of(e):
            return False
        shape, shapes = e.outvars[0].aval.shape, [a.aval.shape for a in e.invars if a.aval.shape]
        entry_by_entry = all(
            len(own) == len(shape) and all(n in (1, size) for n, size in zip(own, shape)) for own in shapes
        )
        return entry_by_entry and any(self.origin_of(a).kind is Kind.ACTIVATION for a in e.invars)

    def put(
        self, e: Equation, location: Location, phase: str, reason: Reason, kind: Kind = Kind.ACTIVATION
    ) -> None:
        """Places an equation, and with it its results."""
        self.out.put(e, location, "backward" if self.roles.is_backward(e) else phase, reason)
        for v in e.outvars:
            self.where[v] = Origin(kind, location.mesh)

    def position(self, mesh: Mesh, task: Task | None, at_least: int) -> int:
        """The first position on `mesh` from `at_least` on; a new one at the end if there is none."""
        for p in range(max(at_least, 0), len(self.positions)):
            here = self.positions[p]
            if here.mesh == mesh and self._can_share(here.task, task):
                self.positions[p] = Position(mesh, _joined(here.task, task))
                return p
        self.positions.append(Position(mesh, task))
        return len(self.positions) - 1

    def position_of_state(self, e: Equation, mesh: Mesh, at_least: int) -> int:
        """The same for an equation that reads state of that mesh in no scope."""
        task = self._state_task(e, mesh)
        behind = {t for p, tasks in self.readers.items() if p < at_least for t in tasks}
        own = task if self.apart and task not in behind else None  # else it is used again in what follows
        position = self.position(mesh, own, at_least)
        if task is not None:
            self.readers.setdefault(position, set()).add(task)
        return position

    def sharing(self) -> set[Task]:
        """The tasks that share a position, though each has state of its own that is read there."""
        return {t for tasks in self.readers.values() if len(tasks) > 1 for t in tasks}

    def name_positions(self) -> None:
        """Gives each position that is in no scope the task whose state is read there, if it is one."""
        for p, tasks in self.readers.items():
            if len(tasks) == 1 and self.positions[p].task is None:
                self.positions[p] = Position(self.positions[p].mesh, *tasks)

    def _state_task(self, e: Equation, mesh: Mesh) -> Task | None:
        """The task that has most bytes of the state that an equation reads on a mesh, if that is known: of
        several the first, in every process alike."""
        held: Counter[Task] = Counter()
        for a in filter(is_var, e.invars):
            if self.where[a].home == mesh:
                held.update(dict.fromkeys(self.owners(a), nbytes(a)))
        return min(held, key=lambda task: (-held[task], self.number[task]), default=None)

    def owners(self, a: Var) -> set[Task]:
        """The tasks whose state a variable is made of, or a new value of."""
        return {self.tasks[root] for root in self.roots.get(a, (a,)) if root in self.tasks}

    def _can_share(self, here: Task | None, task: Task | None) -> bool:
        """Whether a position may be that of two tasks."""
        if here is None or task is None or here == task:
            return True
        return self.fuses and (here.split_backprop, here.remat) == (task.split_backprop, task.remat)

    def last_position(self, mesh: Mesh, at_most: int | None = None) -> int | None:
        """The last position on `mesh` up to `at_most`, else the first one after."""
        found = [p for p, here in enumerate(self.positions) if here.mesh == mesh]
        below = [p for p in found if at_most is None or p <= at_most]
        return below[-1] if below else found[0] if found else None

    def made_by(self, e: Node, kinds: Sequence[Role]) -> list[Location]:
        """Locations of the operands that equations of the given roles made."""
        makers = (self.maker.get(a) for a in e.invars if is_var(a))
        return [
            self.locations[m]
            for m in makers
            if m is not None and self.roles.of[m] in kinds and m in self.locations
        ]

    def state_homes(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of state that an equation reads, by home; of the batch only if it reads nothing else: the
        batch goes to the flow."""
        state = [a for a in e.invars if self.origin_of(a).kind is Kind.STATE]
        own = [a for a in state if a not in self.of_batch]
        flow = any(self.origin_of(a).kind is Kind.ACTIVATION for a in e.invars)
        return self.bytes_by_home(own if own or flow else state)

    def renewed_homes(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of new values of state that an equation reads, by home."""
        return self.bytes_by_home(a for a in e.invars if is_var(a) and a in self.renewed)

    def bytes_by_home(self, atoms: Iterable[Atom]) -> dict[Mesh, int]:
        """Bytes of values that are on a mesh, by mesh."""
        homes: dict[Mesh, int] = {}
        for a in atoms:
            mesh = self.origin_of(a).mesh
            homes[mesh] = homes.get(mesh, 0) + nbytes(a)
        return homes

    def followed_home(self, e: Equation) -> Mesh | None:
        """The home of the state that a result of an equation will be combined with: in another layout too, or
        summed with other gradients, where it is used more than once."""
        for v in e.outvars:
            while v not in self.out.follows and (same := self._only_laid_out_or_summed(v)) is not None:
                v = same
            if v in self.out.follows:
                return self.where[self.out.follows[v]].mesh
        return None

    def _only_laid_out_or_summed(self, v: Var) -> Var | None:
        """What is made of a variable, if that is but another layout or type of it, or a sum of gradients."""
        users = self.users.get(v, ())
        if len(users) == 1 and isinstance(users[0], Equation) and users[0].name in _SAME_VALUES | {"add_any"}:
            return users[0].outvars[0]
        return None

    def at_hand(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of activations that an equation reads, by the meshes that have them: their own first."""
        held = self.bytes_by_home(a for a in e.invars if self.origin_of(a).kind is Kind.ACTIVATION)
        for a in e.invars:
            if self.origin_of(a).kind is Kind.ACTIVATION:
                before = itertools.takewhile(lambda u: u is not e, self.users[a])
                copies = {self.locations[u].mesh for u in before if u in self.locations}
                for mesh in copies & held.keys() - {self.origin_of(a).mesh}:
                    held[mesh] += nbytes(a)
        return held

    def note_renewed(self, e: Equation) -> None:
        """State and what is combined with it entry by entry are its next value, or on the way there."""
        if len(e.outvars) != 1 or e.name in PRODUCTS:
            return
        if e in self.roles.after_inner and not self.renewing:
            return
        out, arrays = e.outvars[0], [a for a in e.invars if a.aval.shape]
        weights = [a for a in arrays if a in self.renewed or self.is_weight(a)]
        at_home = any(self.origin_of(a).home == self.where[out].home for a in weights)
        # One state has several next values where the inner gradients are those of a vmap.
        of_each = all(a in weights or self._is_inner_gradient(a) for a in arrays)
        if at_home and (of_each or all(a.aval.size == out.aval.size for a in arrays)):
            self.renewed.add(out)
            owners = set().union(*map(self.owners, filter(is_var, weights)))
            if len(owners) == 1:
                self.tasks[out] = owners.pop()

    def is_weight(self, a: Atom) -> bool:
        """Whether a value is made of state alone, and not of the batch."""
        return self.origin_of(a).kind is Kind.STATE and a not in self.of_batch

    def _is_inner_gradient(self, a: Atom) -> bool:
        """Whether a value is what an inner backward made, in another layout or scaled by a scalar."""
        e = self.maker.get(a) if is_var(a) else None
        while isinstance(e, Equation) and e not in self.roles.inner and e.name not in PRODUCTS:
            arrays = [b for b in e.invars if is_var(b) and b.aval.shape]
            e = self.maker.get(arrays[0]) if len(arrays) == 1 else None
        return e in self.roles.inner

    def stays(self, e: Equation) -> bool:
        """Places an equation that needs no position: at home, if it is made of state of one home; nowhere, if
        of unplaced values alone. Else it returns False."""
        if self.task_of(e.scope) is not None:
            return False
        origins = [self.origin_of(a) for a in e.invars]
        origin = combine(origins)
        if origin.kind is Kind.ACTIVATION and (self.forward_phase == "none" or e in self.roles.for_updates):
            # State and an unplaced scalar are state still, such as a moment times its decay.
            origin = combine(o for a, o in zip(e.invars, origins) if o.kind is not Kind.FREE or a.aval.shape)
        if origin.kind is Kind.ACTIVATION:
            return False
        if origin.kind is Kind.STATE:
            of_batch = {a in self.of_batch for a in e.invars if self.origin_of(a).kind is Kind.STATE}
            if len(of_batch) == 2:
                return False  # the batch meets weights: the flow begins
            if True in of_batch:
                self.of_batch.update(e.outvars)
            self.roots.update(dict.fromkeys(e.outvars, self.roots_of(e)))
            self.put(e, Location(origin.mesh), "none", Reason.MADE_OF_STATE, Kind.STATE)
        else:
            self.where.update(dict.fromkeys(e.outvars, origin))
        return True


def activation(home: Mesh | None) -> Origin:
    """The origin of an activation on a mesh, or of a value that every mesh can have."""
    return FREE if home is None else Origin(Kind.ACTIVATION, home)


def _joined(here: Task | None, task: Task | None) -> Task | None:
    """The task of a position that another task joins: of two, one with both names."""
    if here is None or task is None or here == task:
        return here or task
    names = [*(here.name or "").split("+"), task.name or ""]
    return dataclasses.replace(here, name="+".join(dict.fromkeys(filter(None, names))) or None)
