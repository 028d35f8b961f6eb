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

Backward equations go where the activations are that they read; those that read none follow their operands,
again up to a minimum cut. What comes after the backward (the optimizer) goes to the state it updates, and
what uses new values of state (a second loss) to those; but a second pass over them is placed as a function of
its own if fewer bytes are sent then.
Work that depends on no placed state gets no place: it is done wherever it is needed (unless that is switched
off: then it is done where it is needed first, and sent).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Equation, Flat, Loop, Node, Var, While, is_var
from mmnnx.mpmd.ir.listing import placed_text
from mmnnx.mpmd.ir.origin import FREE, Kind, Origin, at_home
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.place.backward import join_backward, loose_equations, place_backward
from mmnnx.mpmd.place.boundaries import move_across_boundaries
from mmnnx.mpmd.place.candidates import bytes_sent, frozen_first, latest_order
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.forward import bring_home, place_forward
from mmnnx.mpmd.place.gradient_sums import group_sums, separate_sums
from mmnnx.mpmd.place.options import recomputing
from mmnnx.mpmd.place.region import Fits, Problem, Region, activation
from mmnnx.mpmd.place.second_pass import second_pass, with_second_pass
from mmnnx.mpmd.place.sums_by_mesh import sum_by_mesh
from mmnnx.mpmd.place.task_options import with_task_options
from mmnnx.mpmd.place.unplaced import place_effects, place_free
from mmnnx.mpmd.place.updates import place_update, replicated_updates
from mmnnx.sharding.name_stack import is_backward
from mmnnx.sharding.task import Task


def place(function: Function, flat: Flat, fits: Fits) -> Placed:
    """Places the equations of a function.

    Args:
      function: the function.
      flat: its equations.
      fits: whether a loop can have the schedule that it asks for, if its body is placed so.

    Returns:
      The nodes, with sums of gradients that are made on several meshes taken apart; and where they are.

    Raises:
      ValueError: if several tasks with other options have state on the same mesh.
    """
    shardings = function.shardings
    inputs = {v: at_home(home) for v, home in zip(flat.invars, shardings.homes)}
    inputs |= {v: FREE for v, _ in flat.constants}
    result_state = {
        v: flat.invars[n] for v, n in zip(flat.outvars, shardings.follows) if n is not None and is_var(v)
    }
    nodes, sums = separate_sums(flat.nodes)
    tasks = {v: task for v, task in zip(flat.invars, function.state_tasks) if task is not None}
    own = {v for v, copied in zip(flat.outvars, shardings.on_every_mesh) if is_var(v) and not copied}
    replicated = frozenset(v for v in flat.outvars if is_var(v) and v not in own)
    problem = Problem(nodes, inputs, function.task_of, result_state, fits, tasks)
    problem = dataclasses.replace(
        problem, replicated=replicated, on_one_mesh=frozenset(own), batch=_batch(function, flat)
    )
    placement = _cheapest(problem)
    grouped = group_sums(flat.nodes, sums, placement)
    grouped = sum_by_mesh(grouped, placement, filter(is_var, flat.outvars))
    placed = Placed(flat, grouped, with_task_options(placement, function.multimesh))
    function.dump.write("place", functools.partial(placed_text, placed, function.meshes.names()))
    return placed


def _batch(function: Function, flat: Flat) -> list[Var]:
    """Placed arguments that are no state (no Variable holds them, no task has them), where others are."""
    placed = [
        (v, leaf is not None and (leaf.is_variable or (leaf.rule is not None and leaf.rule.task is not None)))
        for v, leaf, home in zip(flat.invars, function.record.inputs, function.shardings.homes)
        if home is not None
    ]
    return [v for v, is_state in placed if not is_state] if any(s for _, s in placed) else []


def _cheapest(problem: Problem, loop: Loop | None = None) -> Placement:
    """The placement of a function or of the body of a loop; of several the one that sends the fewest bytes,
    and of these the one of fewest stages.

    The others begin with what is not trained; and, if the flow comes to a mesh or to state again, they have
    it go back to the state, or begin later what can begin later, or count no bytes for what a mesh made when
    the flow was there before; or, after an inner gradient, they take nothing for new state; or state that
    several layers combine with what they read may be sent to where they read it. In a loop, a
    single array that is used again, such as an embedding, is sent once for all microbatches, and adds no
    stage; and state that is read from several meshes, such as a head that all stages share, may be sent to
    each.

    Neighbours whose state is on one mesh are one stage, unless the schedule needs or names them apart.
    """
    tried, found = _ways(problem, loop, apart=False)
    sharing = {task.name for region in tried for task in region.sharing()}
    if loop is not None and sharing:
        named = {task for name in loop.spec.named for task in (name, name.rpartition(" ")[0])}
        if named & sharing or not any(problem.fits(loop, r.out) for r in found):
            found = _ways(problem, loop, apart=True)[1]
    best = _best(problem, loop, found).out
    if loop is not None or (second := second_pass(found[0])) is None:
        return best
    return min(
        [best, *_with_second_pass(problem, found, second)], key=lambda p: bytes_sent(problem.nodes, p, 1)
    )


def _with_second_pass(problem: Problem, found: Sequence[Region], second: Problem) -> list[Placement]:
    """The cheapest placement of what is before a second pass, and the pass as a function of its own."""
    apart = set(second.nodes)
    first = [n for n in problem.nodes if n not in apart]
    region = _best(dataclasses.replace(problem, nodes=first), None, found)
    rest = second_pass(region)
    return [with_second_pass(region.out, rest.nodes, _cheapest(rest))] if rest is not None else []


def _ways(problem: Problem, loop: Loop | None, *, apart: bool) -> tuple[list[Region], list[Region]]:
    """The regions that differ in the order in which the flow comes to state, and these and others that differ
    in what it does where it comes to it again; solved, the simplest first."""
    regions = [first := Region(problem, returning=False, apart=apart)]
    found = [_solved(first)]
    meshes = [p.mesh for p in first.positions]
    comes_again = bool(first.sent) or len(set(meshes)) < len(meshes)
    for order in (frozen_first(first), latest_order(first) if comes_again else None):
        if order is not None:
            regions.append(Region(problem, returning=False, apart=apart, order=order))
            found.append(_solved(regions[-1]))
    if first.sent and first.roles.after_inner:  # perhaps an activation was taken for new state
        found.append(_solved(Region(problem, returning=False, apart=apart, renewing=False)))
    shared = frozenset(v for v, meshes in first.read_from.items() if len(meshes) > 1)
    if loop is not None and shared:
        found.append(_solved(Region(problem, returning=False, apart=apart, shared=shared)))
    if moving := _combined_again(first):
        found.append(_solved(Region(problem, returning=False, apart=apart, moving=moving)))
    few = 1 if loop is None else 2
    again = [r for r in regions if len(r.sent) >= few]
    returning = [Region(problem, returning=True, apart=apart, order=r.order) for r in again]
    found += [_solved(r) for r in returning]
    regions += returning
    by_mesh = [
        Region(problem, returning=r.returning, apart=apart, order=r.order, by_mesh=True)
        for r in regions
        if r.comes_back
    ]
    return regions + by_mesh, found + [_solved(r) for r in by_mesh]


def _combined_again(region: Region) -> frozenset[Var]:
    """State that several equations combine with the flow, such as positions that each layer adds."""
    readers = Counter(v for e in region.forward if region.combines_state(e) for v in region.roots_of(e))
    return (
        frozenset(v for v, count in readers.items() if count > 1)
        if len(region.positions) > 1
        else frozenset()
    )


def _best(problem: Problem, loop: Loop | None, found: Sequence[Region]) -> Region:
    """Of these, the one that sends the fewest bytes: the first, or another that can have the schedule."""
    allowed = [found[0], *(r for r in found[1:] if loop is None or problem.fits(loop, r.out))]
    cost = lambda r: (bytes_sent(problem.nodes, r.out, problem.microbatches or 1), len(r.positions))
    return min(allowed, key=cost) if len(allowed) > 1 else found[0]


def _solved(region: Region) -> Region:
    """The region, with all its nodes placed: forward, then backward, loops and updates, then the rest."""
    for e in region.forward:
        place_forward(region, e)
    move_across_boundaries(region, region.forward)
    if Role.BACKWARD not in region.roles.of.values():
        bring_home(region)
    _note_state_uses(region)
    region.loose = loose_equations(region)
    region.replicated = replicated_updates(region)
    backward = region.roles.all(Role.BACKWARD)
    rest = region.nodes.index(backward[-1]) + 1 if backward else 0
    moved = bool(backward)
    while moved:
        _place_after_forward(region, region.nodes[:rest])
        # What follows backward equations follows them where they settle; once, they are stable then.
        moved = move_across_boundaries(region, backward)
    _place_after_forward(region, region.nodes[rest:])
    join_backward(region)
    if not recomputing.get():
        place_free(region)
    place_effects(region)
    region.name_positions()
    return region


def _place_after_forward(region: Region, nodes: Sequence[Node]) -> None:
    """Places loops and updates, and what of the backward has no place yet."""
    for node in nodes:
        if isinstance(node, Loop):
            _place_loop(region, node)
        elif isinstance(node, While):
            _place_while(region, node)
        elif region.roles.of[node] is Role.UPDATE:
            place_update(region, node)
        elif region.roles.of[node] is Role.BACKWARD and node not in region.locations:
            place_backward(region, node)


def _note_state_uses(region: Region) -> None:
    """Where the forward uses state, beside where that state lives: a backward may find a copy there."""
    for e in region.forward:
        if e in region.locations and region.locations[e].position is not None:
            for root in region.roots_of(e):
                region.state_uses.setdefault(root, set()).add(region.locations[e])


def _place_loop(region: Region, loop: Loop) -> None:
    """Places the body of a loop."""
    out, inputs = region.out, _given(region, loop)
    inputs |= {v: at_home(region.where[row[0]].home) for v, row in zip(loop.slice_vars, loop.slices)}
    follows = {o: out.follows[c] for o, c in zip(loop.carry_out, loop.carries) if c in out.follows}
    problem = dataclasses.replace(
        region.problem,
        nodes=loop.body,
        follows=follows,
        tasks=region.tasks | _tasks_of_carries(region, loop),
        roots={v: region.roots[v] for v in loop.captured if v in region.roots},
        microbatches=loop.spec.length,
        batch=[*loop.slice_vars, *_carried_activations(region, loop)],
    )
    state = {s: region.where[s] for s in follows.values() if s not in inputs}

    def place_body(inputs: dict[Var, Origin]) -> Placement:
        return _cheapest(dataclasses.replace(problem, inputs=inputs | state), loop)

    out.bodies[loop] = body = _settled(loop, inputs, place_body)
    for v, c in zip(loop.carry_in, loop.carries):
        home = inputs[v].home
        tasks = [p.task for p in body.positions if p.mesh == home and p.task is not None]
        if any(t.loop_dependent_mesh_slice is not None for t in tasks) and c in out.follows:
            home = region.where[out.follows[c]].home  # the sums of all its meshes are added up there
        region.where[c] = activation(home)
    for y, row in zip(loop.ys, loop.stacks):
        region.where.update(dict.fromkeys(row, activation(body.where[y].home)))


def _tasks_of_carries(region: Region, loop: Loop | While) -> dict[Var, Task]:
    """Whose state it is that a loop carries."""
    found: dict[Var, Task] = {}
    for v, a in zip(loop.carry_in, loop.init):
        owners = region.owners(a) if is_var(a) else set()
        if len(owners) == 1:
            found[v] = owners.pop()
    return found


def _carried_activations(region: Region, loop: Loop | While) -> list[Var]:
    """What a loop without a backward carries that is no state: as a batch does, it goes to the flow."""
    if any(isinstance(n, Equation) and is_backward(n.scope) for n in loop.body):
        return []
    given = zip(loop.carry_in, loop.init)
    return [v for v, a in given if region.origin_of(a).kind is not Kind.STATE]


def _place_while(region: Region, loop: While) -> None:
    """Places the body of a while, as a function whose state is what it carries."""
    inputs = _given(region, loop)

    def place_body(inputs: dict[Var, Origin]) -> Placement:
        follows = {o: v for v, o in zip(loop.carry_in, loop.carry_out) if inputs[v].home is not None}
        roots = {v: region.roots[v] for v in loop.captured if v in region.roots}
        fits, tasks = region.problem.fits, region.tasks | _tasks_of_carries(region, loop)
        batch = _carried_activations(region, loop)
        return _cheapest(
            Problem(loop.body, inputs, region.task_of, follows, fits, tasks, roots=roots, batch=batch)
        )

    region.out.bodies[loop] = _settled(loop, inputs, place_body)
    region.where.update((c, activation(inputs[v].home)) for v, c in zip(loop.carry_in, loop.carries))


def _given(region: Region, loop: Loop | While) -> dict[Var, Origin]:
    """The origins of what the body of a loop is given: of outer variables, and of carries."""
    outer = {v: region.where[v] for v in loop.captured}
    given = {v: o if o.home is None else at_home(o.home) for v, o in outer.items()}
    return given | {v: at_home(region.origin_of(a).home) for v, a in zip(loop.carry_in, loop.init)}


def _settled(
    loop: Loop | While, inputs: dict[Var, Origin], place_body: Callable[[dict[Var, Origin]], Placement]
) -> Placement:
    """The placement of a loop's body, and in `inputs` the homes of its carries.

    A carry without a home gets that of its new value. One that is renewed on another mesh, and not read at
    home, is sent there once, and does not come home with every iteration.
    """
    sent: set[Var] = set()
    while True:
        body = place_body(inputs)
        readers = _readers(loop, body)
        moved: dict[Var, Origin] = {}
        for v, o in zip(loop.carry_in, loop.carry_out):
            home, new = inputs[v].home, body.where[o].home
            elsewhere = v not in sent and readers.get(v, {None}).isdisjoint({home, None})
            if new not in (None, home) and (home is None or elsewhere):
                moved[v] = Origin(Kind.STATE, new)
        if not moved:
            return body
        sent |= moved.keys()
        inputs |= moved


def _readers(loop: Loop | While, body: Placement) -> dict[Var, set[Mesh | None]]:
    """The meshes that read each variable in a body; None for what has no place, and for a while in it."""
    found: dict[Var, set[Mesh | None]] = {}
    for node in loop.body:
        mesh = body.locations[node].mesh if node in body.locations else None
        for a in filter(is_var, node.invars):
            found.setdefault(a, set()).add(mesh)
    return found
