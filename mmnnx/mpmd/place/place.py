"""Every equation gets a TaskMesh: from its task scope, from the homes of state, then by inference.

The flow of activations through the meshes defines *positions*: position 0 is where computation starts, and
each time it moves on to another TaskMesh a further position begins. (A mesh that is visited twice has two.)
Forward equations are placed at positions in three steps:

1. an equation in a task scope, or one that reads placed state, is tied to a mesh and so to a position at or
   after those of its operands;
2. any other equation starts out with its latest operand;
3. equations that nothing ties down then move to the side of each boundary where fewer bytes cross it, which
   is a minimum cut.

Where state is read again further on than it lives, either it goes there or the flow goes back to it: both are
tried, and the one that sends fewer bytes is taken.

Backward equations go where the residuals they consume are; those that consume none follow their operands,
again up to a minimum cut. What comes after the backward (the optimizer) goes to the state it updates, and
what uses new values of state (a second loss) to those.
Work that depends on no placed state gets no place: it is done wherever it is needed (unless that is switched
off: then it is done where it is needed first, and sent).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from jax.sharding import Mesh

from mmnnx.mpmd.ir.dataflow import follow_back
from mmnnx.mpmd.ir.equations import LAYOUT, Atom, Equation, Loop, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.origin import CONST, FREE, Kind, Origin, at_home, combine
from mmnnx.mpmd.ir.placement import Location, Placement, Position
from mmnnx.mpmd.place.boundaries import Flow, settle
from mmnnx.mpmd.place.classify import Class, classify
from mmnnx.mpmd.place.options import fusing, recomputing
from mmnnx.sharding.task import Task

TaskOf = Callable[[str], "tuple[Task, Mesh] | None"]
Fits = Callable[[Loop, Placement], bool]

_CONTRACTIONS = {"dot_general", "conv_general_dilated"}


def place(
    nodes: Sequence[Node],
    inputs: dict[Var, Origin],
    task_of: TaskOf,
    follows: dict[Var, Var],
    fits: Fits,
) -> Placement:
    """Places the nodes of a function.

    Args:
      nodes: from `trace.inline_calls`.
      inputs: the origin of every input and constant.
      task_of: from a name stack to the task scope that it lies in and that task's mesh.
      follows: results whose home is that of a state variable (outputs that follow their parameter).
      fits: whether a loop can have the schedule that it asks for, if its body is placed so.
    """
    return _cheaper(functools.partial(_Region, nodes, inputs, task_of, follows, fits), fits)


def _cheaper(region: Callable[..., _Region], fits: Fits, loop: Loop | None = None) -> Placement:
    """The placement of a region; if the flow comes to a mesh or to state again, of several the one that sends
    the fewest bytes, and of these the one of fewest stages.

    The others have the flow go back to the state, or begin later what can begin later. In a loop, a single
    array that is used again, such as an embedding, is sent once for all microbatches, and adds no stage.
    """
    first = region(returning=False)
    found = [first.run()]
    meshes = [p.mesh for p in found[0].positions]
    if not first.sent and len(set(meshes)) == len(meshes):
        return found[0]
    tried = [first]
    if (late := first.latest()) is not None:
        tried.append(region(returning=False, order=late))
        found.append(tried[-1].run())
    few = 1 if loop is None else 2
    found += [region(returning=True, order=r.order).run() for r in tried if len(r.sent) >= few]
    allowed = [found[0], *(p for p in found[1:] if loop is None or fits(loop, p))]
    cost = lambda p: (_bytes_sent(first.nodes, p, first.microbatches), len(p.positions))
    return min(allowed, key=cost) if len(allowed) > 1 else found[0]


def _bytes_sent(nodes: Sequence[Node], placement: Placement, times: int) -> int:
    """Bytes of the values that a mesh reads from another, for all microbatches; of state, once."""
    readers: dict[Var, set[Mesh]] = {}
    total = 0
    for n in nodes:
        if isinstance(n, Loop):
            total += _bytes_sent(n.body, placement.bodies[n], n.spec.length)
        elif n in placement.locations:
            mesh = placement.locations[n].mesh
            for a in filter(is_var, n.invars):
                if placement.where[a].home not in (None, mesh):
                    readers.setdefault(a, set()).add(mesh)
    for a, meshes in readers.items():
        total += nbytes(a) * len(meshes) * (1 if placement.where[a].kind is Kind.STATE else times)
    return total


class _Region:
    """One pass of placement over one list of nodes: the outermost one, or the body of a loop."""

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: dict[Var, Origin],
        task_of: TaskOf,
        follows: dict[Var, Var],
        fits: Fits,
        roots: dict[Var, frozenset[Var]] | None = None,
        microbatches: int | None = None,
        slices: Iterable[Var] = (),
        *,
        returning: bool,
        order: Sequence[Equation] | None = None,
    ):
        self.nodes = nodes
        self.order = order  # in which the forward is placed, if not in that of the nodes
        self.of_batch = set(slices)  # what is made of the batch alone, where that has a home
        self.task_of, self.fits = task_of, fits
        self.in_loop = microbatches is not None
        self.fuses = fusing.get() == "all" or (fusing.get() == "loops" and self.in_loop)
        self.microbatches = microbatches or 1
        self.out = Placement()
        self.where, self.locations, self.positions = self.out.where, self.out.locations, self.out.positions
        self.where.update(inputs)
        # For every variable derived from state alone: the inputs it is derived from.
        self.roots = {v: frozenset([v]) for v, o in inputs.items() if o.kind is Kind.STATE} | (roots or {})
        self.renewed: set[Var] = set()  # new values of state, and what they are made of
        self.returning = returning  # the flow to state that was used before, where that is elsewhere
        self.sent: set[Var] = set()  # state that goes to the flow instead
        self.tied: set[Node] = set()
        self.maker: dict[Var, Node] = {v: n for n in nodes for v in n.outvars}
        self.users: dict[Var, list[Node]] = {}
        for node in nodes:
            for a in dict.fromkeys(filter(is_var, node.invars)):
                self.users.setdefault(a, []).append(node)
        self.classes = classify(nodes, self.users)
        autodiff = self.in_loop or Class.BACKWARD in self.classes.of.values()
        self.forward_phase = "forward" if autodiff else "none"
        self.out.follows.update(follows)
        state = {v for v, o in inputs.items() if o.kind is Kind.STATE}
        follow_back(
            self.classes.all(Class.LATE), self.out.follows, lambda a: a if is_var(a) and a in state else None
        )

    def run(self) -> Placement:
        forward = self.order or self.classes.all(Class.FORWARD)
        self.used_state: set[Var] = set()
        for e in forward:
            self._place_forward(e)
        self._settle(forward)
        if self.forward_phase == "none":
            self._bring_home(forward)
        # Where the forward uses state, beside where that state lives: a backward may find a copy there.
        self.state_uses: dict[Var, set[Location]] = {}
        for e in forward:
            if e in self.locations and self.locations[e].position is not None:
                for root in self._roots(e):
                    self.state_uses.setdefault(root, set()).add(self.locations[e])
        self.loose = self._loose(forward)
        moved = True
        while moved:
            for node in self.nodes:
                if isinstance(node, Loop):
                    self._place_loop(node)
                elif self.classes.of[node] is Class.LATE:
                    self._place_late(node)
                elif self.classes.of[node] is Class.BACKWARD and node not in self.locations:
                    self._place_backward(node)
            # What follows backward equations follows them where they settle; once, they are stable then.
            moved = self._settle(self.classes.all(Class.BACKWARD))
        self._join_backward()
        if not recomputing.get():
            self._place_free()
        self._place_effects()
        return self.out

    def latest(self) -> list[Equation] | None:
        """The forward with each equation as late as what reads it allows, by the number of times that a flow
        goes to another mesh ahead of it; None where state is come to in the same order."""
        forward = self.classes.all(Class.FORWARD)
        mesh = {e: self._home(e) for e in forward if e in self.tied}
        depth: dict[Node, int] = {}
        here: dict[
            Node, Mesh | None
        ] = {}  # the mesh of an equation, or else that of the flow that reaches it

        def hops(a: Node, b: Node) -> int:
            return int(None not in (here[a], here[b]) and here[a] != here[b])

        for e in forward:
            made_of = [m for a in e.invars if is_var(a) and (m := self.maker.get(a)) in depth]
            deepest = max(made_of, key=depth.__getitem__, default=None)
            here[e] = mesh.get(e, here[deepest] if deepest is not None else None)
            depth[e] = max((depth[m] + hops(m, e) for m in made_of), default=0)
        end = max(depth.values(), default=0)
        for e in reversed(forward):
            users = [u for v in e.outvars for u in self.users.get(v, ()) if u in depth]
            depth[e] = min((depth[u] - hops(e, u) for u in users), default=end)
        late = sorted(forward, key=depth.__getitem__)
        same = [e for e in late if e in self.tied] == [e for e in forward if e in self.tied]
        return None if same else late

    def _home(self, e: Equation) -> Mesh:
        """The mesh of an equation that is tied to one."""
        scoped, homes = self.task_of(e.scope), self._state_homes(e) or self._renewed_homes(e)
        return scoped[1] if scoped is not None else max(homes, key=homes.__getitem__)

    def _bring_home(self, forward: Sequence[Equation]) -> None:
        """Has new values of state made at its home, where most bytes of what they are made of are: a cache
        whose rows are chosen by what the last mesh says, say."""
        home: dict[Node, Mesh] = {}
        for e in reversed(forward):
            users = [u for v in e.outvars for u in self.users.get(v, ())]
            homes = {self.where[self.out.follows[v]].mesh for v in e.outvars if v in self.out.follows}
            homes |= {home[u] for u in users if u in home}
            if len(homes) == 1 and all(u in home for u in users):
                (home[e],) = homes
        for e in forward:
            if e in home and e not in self.tied and e in self.locations and self.locations[e].mesh != home[e]:
                held = self._at_hand(e)
                if home[e] == max(held, key=held.__getitem__, default=None):
                    self._set(e, Location(home[e]), "none")

    # -- one equation -------------------------------------------------------------------------------------

    def _of(self, atom: Atom) -> Origin:
        return self.where[atom] if is_var(atom) else CONST

    def _roots(self, e: Node) -> frozenset[Var]:
        return frozenset().union(*(self.roots.get(a, ()) for a in e.invars if is_var(a)))

    def _set(self, e: Equation, location: Location, phase: str, kind: Kind = Kind.ACTIVATION) -> None:
        self.locations[e] = location
        self.out.phases[e] = "backward" if self.classes.is_backward(e) else phase
        for v in e.outvars:
            self.where[v] = Origin(kind, location.mesh)

    def _stays(self, e: Equation) -> bool:
        """Places what is made of free values alone (nowhere) or of one home's state (there), else False."""
        if self.task_of(e.scope) is not None:
            return False
        origins = [self._of(a) for a in e.invars]
        origin = combine(origins)
        if origin.kind is Kind.ACTIVATION and (self.forward_phase == "none" or e in self.classes.for_updates):
            # State and a free scalar are state still, such as a moment times its decay.
            origin = combine(o for a, o in zip(e.invars, origins) if o.kind is not Kind.FREE or a.aval.shape)
        if origin.kind is Kind.ACTIVATION:
            return False
        if origin.kind is Kind.STATE:
            of_batch = {a in self.of_batch for a in e.invars if self._of(a).kind is Kind.STATE}
            if len(of_batch) == 2:
                return False  # the batch meets weights: the flow begins
            if True in of_batch:
                self.of_batch.update(e.outvars)
            self.roots.update(dict.fromkeys(e.outvars, self._roots(e)))
            self._set(e, Location(origin.mesh), "none", Kind.STATE)
        else:
            self.where.update(dict.fromkeys(e.outvars, origin))
        return True

    def _position(self, mesh: Mesh, task: Task | None, at_least: int) -> int:
        """The first position on `mesh` from `at_least` on; a new one at the end if there is none."""
        for p in range(max(at_least, 0), len(self.positions)):
            here = self.positions[p]
            if here.mesh == mesh and (joined := self._joined(here.task, task)) is not False:
                self.positions[p] = Position(mesh, joined)
                return p
        self.positions.append(Position(mesh, task))
        return len(self.positions) - 1

    def _joined(self, here: Task | None, task: Task | None) -> Task | Literal[False] | None:
        """The task of a position that another joins, False if it must have one of its own."""
        if task is None or here in (None, task):
            return here or task
        assert here is not None
        if not self.fuses or (here.split_backprop, here.remat) != (task.split_backprop, task.remat):
            return False
        names = [*(here.name or "").split("+"), task.name or ""]
        return dataclasses.replace(here, name="+".join(dict.fromkeys(filter(None, names))) or None)

    def _flow(self, e: Node, kinds: Sequence[Class]) -> list[Location]:
        """Spots of the operands that equations of the given classes made."""
        makers = (self.maker.get(a) for a in e.invars if is_var(a))
        return [
            self.locations[m]
            for m in makers
            if m is not None and self.classes.of[m] in kinds and m in self.locations
        ]

    def _state_homes(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of state that an equation reads, by home; of the batch only if it reads no other."""
        state = [a for a in e.invars if self._of(a).kind is Kind.STATE]
        return self._bytes_by_home([a for a in state if a not in self.of_batch] or state)

    def _renewed_homes(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of new values of state that an equation reads, by home."""
        return self._bytes_by_home(a for a in e.invars if is_var(a) and a in self.renewed)

    def _bytes_by_home(self, atoms: Iterable[Atom]) -> dict[Mesh, int]:
        homes: dict[Mesh, int] = {}
        for a in atoms:
            mesh = self._of(a).mesh
            homes[mesh] = homes.get(mesh, 0) + nbytes(a)
        return homes

    def _note_renewed(self, e: Equation) -> None:
        """State and what is combined with it entry by entry are its next value, or on the way there."""
        if len(e.outvars) != 1 or e.name in _CONTRACTIONS:
            return
        out, arrays = e.outvars[0], [a for a in e.invars if a.aval.shape]
        weights = [a for a in arrays if a in self.renewed or self._of(a).kind is Kind.STATE]
        if any(a not in self.of_batch and self._of(a).home == self.where[out].home for a in weights) and all(
            a.aval.size == out.aval.size for a in arrays
        ):
            self.renewed.add(out)

    def _place_forward(self, e: Equation) -> None:
        if self._stays(e):
            return
        before = max(
            (s.position for s in self._flow(e, (Class.FORWARD,)) if s.position is not None), default=-1
        )
        scoped, homes, renewed = self.task_of(e.scope), self._state_homes(e), self._renewed_homes(e)
        homes = homes or renewed
        if scoped is not None:
            task, mesh = scoped
            position = self._position(mesh, task, before)
        elif homes:
            mesh = max(homes, key=homes.__getitem__)
            ahead = any(p.mesh == mesh for p in self.positions[max(before, 0) :])
            flow = [a for a in e.invars if a.aval.shape and self._of(a).kind is Kind.ACTIVATION]
            again = flow and before >= 0 and not ahead and bool(renewed or self._roots(e) & self.used_state)
            if again and not self.returning:
                # Shared state used again further on: it is sent there, rather than the flow sent back. (A
                # scalar is sent back: such as the norm of all weights, which scales each of them.)
                self.sent |= self._roots(e) or {a for a in e.invars if is_var(a) and a in self.renewed}
                position = before
            else:
                position = self._position(mesh, None, before)
        else:
            position = max(before, 0)
        if scoped is not None or homes:
            self.tied.add(e)
            self.used_state |= self._roots(e)
        self._set(e, Location(self.positions[position].mesh, position), self.forward_phase)
        if e in self.classes.after_inner:
            self._note_renewed(e)

    def _available(self, atom: Atom) -> set[Location] | None:
        """Where the forward uses a value, None if it nowhere does and every mesh can have it."""
        if not is_var(atom):
            return None
        maker = self.maker.get(atom)
        if maker in self.loose:  # wherever what it is made of is
            operands = [s for a in maker.invars if (s := self._available(a)) is not None]
            return set.intersection(*operands) if operands else None
        origin = self._of(atom)
        if origin.kind is Kind.STATE:
            uses = set().union(*(self.state_uses.get(r, ()) for r in self.roots.get(atom, ())))
            return uses or {Location(origin.mesh, self._last_position(origin.mesh))}
        holders = [maker, *self.users.get(atom, ())]
        held = {
            self.locations[m] for m in holders if m in self.locations and self.classes.of[m] is Class.FORWARD
        }
        # What is free could be had everywhere, but a gradient over it belongs to the stage that used it.
        return held if origin.kind is Kind.ACTIVATION else held or None

    def _last_position(self, mesh: Mesh, at_most: int | None = None) -> int | None:
        """The last position on `mesh` up to `at_most`, else the first one after."""
        found = [p for p, here in enumerate(self.positions) if here.mesh == mesh]
        below = [p for p in found if at_most is None or p <= at_most]
        return below[-1] if below else found[0] if found else None

    def _loose(self, forward: Sequence[Equation]) -> set[Node]:
        """Forward equations that only the backward reads: factors of derivatives, computed ahead by JAX."""
        loose: set[Node] = set()
        for e in reversed(forward):
            users = [u for v in e.outvars for u in self.users.get(v, ())]
            ahead = [u for u in users if self.classes.of[u] is Class.FORWARD and u not in loose]
            placed = e in self.locations and e not in self.tied and self.locations[e].position is not None
            if placed and not ahead and any(self.classes.of[u] is Class.BACKWARD for u in users):
                loose.add(e)
        return loose

    def _join_backward(self) -> None:
        """Moves loose equations to where the backward that reads them went."""
        for e in reversed([n for n in self.classes.all(Class.FORWARD) if n in self.loose]):
            users = {
                self.locations[u] for v in e.outvars for u in self.users.get(v, ()) if u in self.locations
            }
            if len(users) == 1:
                (location,) = users
                if location.position is not None and all(
                    (s := self._available(a)) is None or location in s for a in e.invars
                ):
                    self._set(e, location, self.out.phases[e])

    def _place_free(self) -> None:
        """Gives work that depends on no placed state the place where its result is read first."""
        for e in reversed(self.nodes):
            if not isinstance(e, Equation) or e in self.locations or e.name in LAYOUT or e.eqn.effects:
                continue
            if self.where[e.outvars[0]].kind is not Kind.FREE or not any(v.aval.shape for v in e.outvars):
                continue  # constants and scalars are no bytes worth sending
            found: list[Location] = []
            for u in (u for v in e.outvars for u in self.users.get(v, ())):
                if isinstance(u, Loop):
                    body = self.out.bodies[u]
                    inner = [
                        body.locations[n]
                        for n in u.body
                        if n in body.locations and set(n.invars) & set(e.outvars)
                    ]
                    found += [Location(s.mesh) for s in sorted(inner, key=_rank)[:1]]
                elif u in self.locations:
                    found.append(self.locations[u])
            if found:
                self._set(
                    e, min(found, key=_rank), self.forward_phase if found[0].position is not None else "none"
                )

    def _place_effects(self) -> None:
        """Callbacks that depend on no placed state happen once: where the flow begins; where there is none,
        with the first work, that of loops too, or where state is."""
        locations = [
            *self.locations.values(),
            *(s for body in self.out.bodies.values() for s in body.locations.values()),
        ]
        homes = (Location(o.home) for o in self.where.values() if o.home is not None)
        first = Location(locations[0].mesh) if locations else next(homes, None)
        begin = Location(self.positions[0].mesh, 0) if self.positions else first
        for e in self.nodes:
            if isinstance(e, Equation) and e.eqn.effects and e not in self.locations and begin is not None:
                self._set(e, begin, self.forward_phase if self.positions else "none")

    def _place_backward(self, e: Equation) -> None:
        if self._stays(e):
            return
        incoming = self._flow(e, (Class.BACKWARD, Class.LATE, Class.LOOP))
        came = min((s.position for s in incoming if s.position is not None), default=None)
        makers = {a: self.maker.get(a) for a in e.invars if is_var(a)}
        residuals = {
            a: locations
            for a, m in makers.items()
            if (m is None or self.classes.of[m] is Class.FORWARD or self._of(a).kind is Kind.STATE)
            and (locations := self._available(a))
        }
        scoped = self.task_of(e.scope)
        if scoped is not None:
            task, mesh = scoped
            choices = {s for locations in residuals.values() for s in locations if s.mesh == mesh}
            if not choices:
                position = self._last_position(mesh, came)
                choices = {Location(mesh, self._position(mesh, task, 0) if position is None else position)}
        elif residuals:
            choices = set.intersection(*residuals.values())
            if incoming and len(choices) > 1 and all(self._of(a).kind is Kind.FREE for a in residuals):
                # A scalar that several stages use, say, is at hand wherever this comes to be.
                self._set(e, min(incoming, key=_rank), "backward")
                return
            if not choices:
                # No mesh has them all: the one that has most bytes of them.
                held: dict[Location, int] = {}
                for a, locations in residuals.items():
                    for s in locations:
                        held[s] = held.get(s, 0) + nbytes(a)
                choices = {s for s in held if held[s] == max(held.values())}
        elif (renewed := self._renewed_homes(e)) and None in (s.position for s in incoming):
            self._set(e, Location(max(renewed, key=renewed.__getitem__)), "backward")
            self._note_renewed(e)
            return
        elif incoming:
            ahead = self._flow(e, (Class.LATE,)) if came is None else []
            # What is recomputed in a backward is no residual: a gradient is made at home even so.
            at_home = [s for s in incoming if s.mesh == self._followed(e)]
            location = self._beside(e, ahead) if ahead else min(at_home or incoming, key=_rank)
            self._set(e, location, "backward")
            return
        else:
            choices = {Location(self.positions[-1].mesh, len(self.positions) - 1)}
        reached = [s for s in choices if came is None or _rank(s) <= came]
        location = max(reached, key=_rank) if reached else min(choices, key=_rank)
        sent = scoped is None and came is None and all(s.mesh != location.mesh for s in incoming)
        if sent and (there := self._all_there(incoming, residuals)) is not None:
            self._set(e, there, "backward")
            return
        self.tied.add(e)
        self._set(e, location, "backward")
        if scoped is not None and location.position is not None:
            here, name = self.positions[location.position].task, scoped[0].name
            if name and here is not None and name not in (here.name or "").split("+"):
                self.out.backward_tasks[location.position] = name

    def _all_there(self, incoming: Sequence[Location], residuals: Iterable[Var]) -> Location | None:
        """For the backward of a second loss, which reads what the first had as well: where a gradient comes
        from, if all else that is read is there."""
        held = [{self.locations[n].mesh for n in self.users[a] if n in self.locations} for a in residuals]
        return next((s for s in incoming if all(s.mesh in meshes for meshes in held)), None)

    def _beside(self, e: Equation, ahead: Sequence[Location]) -> Location:
        """For the backward of a second loss: where all it reads is at hand, else where its forward was."""
        held = []
        for a in filter(is_var, e.invars):
            if (maker := self.maker.get(a)) in self.locations:
                users = [u for u in self.users[a] if self.classes.of[u] is Class.LATE and u in self.locations]
                held.append({self.locations[n].mesh for n in (maker, *users)})
        shared = set.intersection(*held)
        both = [s for s in self._flow(e, (Class.BACKWARD, Class.LATE)) if s.mesh in shared]
        return (both or ahead)[0]

    def _place_late(self, e: Equation) -> None:
        if self._stays(e):
            return
        scoped, weight = self.task_of(e.scope), self._state_homes(e)
        arriving = self._flow(e, (Class.FORWARD, Class.BACKWARD, Class.LATE))
        if scoped is None and not weight:
            weight = self._at_hand(e)
            # Sums of a gradient are done at the home of its parameter, if a part of it is there, and scalings
            # after the loop in any case: there may be several of one gradient, as in Adam.
            home = self._followed(e)
            alone = not self.in_loop and len([a for a in e.invars if a.aval.shape]) == 1
            if home is not None and (home in weight or alone):
                weight = {home: 0}
            else:
                weight = self._renewed_homes(e) or weight
        mesh = scoped[1] if scoped is not None else max(weight, key=weight.__getitem__)
        # In a loop, sums of gradients and the like join the fragment that made what they sum.
        joined = [s for s in arriving if s.mesh == mesh and s.position is not None] if self.in_loop else []
        if joined:
            self._set(e, min(joined, key=_rank), "backward")
        else:
            self._set(e, Location(mesh), "none")
        self._note_renewed(e)

    def _followed(self, e: Equation) -> Mesh | None:
        """The home of the state that a result of an equation will be combined with."""
        return next((self.where[self.out.follows[v]].mesh for v in e.outvars if v in self.out.follows), None)

    def _at_hand(self, e: Equation) -> dict[Mesh, int]:
        """Bytes of activations that an equation reads, by the meshes that have them: their own first."""
        held = self._bytes_by_home(a for a in e.invars if self._of(a).kind is Kind.ACTIVATION)
        for a in e.invars:
            if self._of(a).kind is Kind.ACTIVATION:
                before = itertools.takewhile(lambda u: u is not e, self.users[a])
                copies = {self.locations[u].mesh for u in before if u in self.locations}
                for mesh in copies & held.keys() - {self._of(a).mesh}:
                    held[mesh] += nbytes(a)
        return held

    def _place_loop(self, loop: Loop) -> None:
        inputs = {}
        for v in loop.captured:
            origin = self.where[v]
            inputs[v] = origin if origin.home is None else at_home(origin.home)
        inputs |= {v: at_home(self.where[row[0]].home) for v, row in zip(loop.slice_vars, loop.slices)}
        inputs |= {v: at_home(self._of(a).home) for v, a in zip(loop.carry_in, loop.init)}
        roots = {v: self.roots[v] for v in loop.captured if v in self.roots}
        follows = {
            o: self.out.follows[c] for o, c in zip(loop.carry_out, loop.carries) if c in self.out.follows
        }
        while True:
            known = inputs | {s: self.where[s] for s in follows.values() if s not in inputs}
            of_loop = (loop.body, known, self.task_of, follows, self.fits, roots)
            region = functools.partial(_Region, *of_loop, loop.spec.length, loop.slice_vars)
            body = _cheaper(region, self.fits, loop)
            moved = {
                v: Origin(Kind.STATE, body.where[o].home)
                for v, o in zip(loop.carry_in, loop.carry_out)
                if inputs[v].home is None and body.where[o].home is not None
            }
            if not moved:
                break
            inputs |= moved
        self.out.bodies[loop] = body
        for v, c in zip(loop.carry_in, loop.carries):
            home = inputs[v].home
            tasks = [p.task for p in body.positions if p.mesh == home and p.task is not None]
            if any(t.loop_dependent_mesh_slice is not None for t in tasks) and c in self.out.follows:
                home = self.where[self.out.follows[c]].home  # the sums of all its meshes are added up there
            self.where[c] = _activation(home)
        for y, row in zip(loop.ys, loop.stacks):
            self.where.update(dict.fromkeys(row, _activation(body.where[y].home)))

    def _settle(self, equations: Sequence[Equation]) -> bool:
        """Moves equations that nothing ties down across the boundaries between positions, downstream.

        Returns:
          Whether any equation moved.
        """
        flow = {
            e: p for e in equations if e in self.locations and (p := self.locations[e].position) is not None
        }
        if not flow or len(self.positions) < 2:
            return False
        last = len(self.positions) - 1
        backward = self.classes.of[equations[0]] is Class.BACKWARD  # as all of them

        def coordinate(position: int) -> int:
            return last - position if backward else position

        at: dict[Node, int] = {e: coordinate(p) for e, p in flow.items()}
        wanted: dict[Node, int] = {}
        for e in flow:
            for state in (self.out.follows[v] for v in e.outvars if v in self.out.follows):
                position = self._last_position(self.where[state].mesh, flow[e])
                if position is not None and coordinate(position) >= at[e]:
                    wanted[e] = coordinate(position)
        # A gradient is summed where it is made and sent home once, not in every microbatch.
        times = self.microbatches if backward else 1
        meshes = [self.positions[coordinate(n)].mesh for n in range(len(self.positions))]
        new = settle(Flow(at, self.tied, wanted, times, meshes, self.maker, self.users))
        for e in flow:
            if e not in self.tied:
                position = coordinate(new[e])
                self._set(e, Location(self.positions[position].mesh, position), self.out.phases[e])
        return new != at


def _rank(location: Location) -> int:
    return -1 if location.position is None else location.position


def _activation(home: Mesh | None) -> Origin:
    return FREE if home is None else Origin(Kind.ACTIVATION, home)
