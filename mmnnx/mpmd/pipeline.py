"""From a traced function and its arguments to something that runs: all passes, put together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.compile.input_shardings import constrains, derive_shardings
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.emit.emit import build
from mmnnx.mpmd.frontend.in_out_shardings import InOutShardings, find_in_out_shardings
from mmnnx.mpmd.frontend.meshes import Meshes
from mmnnx.mpmd.frontend.observe import Leaf, Record
from mmnnx.mpmd.hoist.gathers import gather_once
from mmnnx.mpmd.hoist.gradient_sums import split_sums
from mmnnx.mpmd.hoist.reductions import reduce_once
from mmnnx.mpmd.inline.calls import inline_calls
from mmnnx.mpmd.ir.equations import Equation, Flat, Loop, Node, Var, is_var, scopes_in
from mmnnx.mpmd.ir.fragments import Fragment, LoopPlan, PlacedVar, Plan
from mmnnx.mpmd.ir.origin import FREE, at_home
from mmnnx.mpmd.ir.placement import Placement, Position
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import entering, is_committed, mesh_of, transferred, without
from mmnnx.mpmd.partition.change_mesh import localise
from mmnnx.mpmd.partition.fragments import cut
from mmnnx.mpmd.partition.stages import fits
from mmnnx.mpmd.place.place import TaskOf, place
from mmnnx.mpmd.runtime.prepare import BoundProgram, Run, preparer
from mmnnx.mpmd.schedule.dispatch_order import Moves
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.task import Task, find_task, place_task, placed_tasks


class Split:
    """A function that was split for arguments that live in certain places.

    Attributes:
      program: what a call runs.
      prepare: compiles it, once, and returns the function from flat arguments to flat results; None where
        everything is on one TaskMesh already and the function can run as it is.
      input_shardings: derives where each flat argument would best live.
      settled: for flat arguments that live nowhere in particular, where a call leaves their new values, if
        it may be called with those as well.
    """

    def __init__(
        self,
        program: Program,
        prepare: Callable[[], Run] | None,
        input_shardings: Callable[[], list[NamedSharding]],
        settled: dict[int, NamedSharding] | None = None,
    ):
        self.program = program
        self.input_shardings = input_shardings
        self.settled = settled or {}
        self.prepare = functools.cache(prepare) if prepare is not None else None


def split(
    traced: jax.stages.Traced, record: Record, leaves: Sequence[Any], multimesh: MultiMesh | None
) -> Split:
    """Cuts a traced function for arguments that live where `leaves` do.

    Raises:
      PlacementError, ValueError: as `mm.jit` does.
      VerificationError: if the program does not hold together.
    """
    if len(traced.jaxpr.in_avals) > len(leaves):  # JAX hands it over as an argument
        raise ValueError(
            f"{traced.fun_name} reads a value of another trace, which has ended: such as an array that a "
            "Module made inside of a jit and keeps as a plain attribute. Make it a Variable, or a number. Or "
            "one that was kept from inside of a loop or mm.microbatch: return it from there"
        )
    meshes = Meshes(multimesh)

    @functools.cache
    def task_of(scope: str):
        task = find_task(scope, multimesh)
        try:
            return None if task is None else (task, meshes.of_task(task))
        except ValueError as error:
            raise ValueError(f"{error} (in the scope {scope!r})") from None

    for scope in scopes_in(traced.jaxpr):
        task_of(scope)
    for task, mesh in dict.fromkeys(_placing(record)):
        place_task(task, mesh)
    ends = find_in_out_shardings(record, leaves, traced.jaxpr.out_avals, meshes)
    placed = bool(meshes.names())
    if not placed and multimesh is not None and constrains(traced.jaxpr):
        meshes.canonical(multimesh.mesh)
    divided = meshes.tasks()
    if len(divided) > 1 and not (around := jax.sharding.get_abstract_mesh()).empty:
        raise ValueError(
            f"mm.jit under jax.set_mesh, of a mesh with axes {dict(around.shape)}: that would be the mesh of "
            f"every task, and they have {len(divided)} of their own. Leave jax.set_mesh, and use the "
            "MultiMesh in its place (`with mesh:`, or mm.jit(mesh=mesh))"
        )
    if len(divided) == 1 and not meshes.moving:
        choices: Iterable[_Pieces] = [_undivided(traced.jaxpr, divided[0], meshes.names())]
    else:
        choices = _divide(traced.jaxpr, ends, task_of, meshes)
    donates = [a.donated for a in jax.tree.leaves(traced.args_info)]
    pieces, program = _fitting((p, _program(p, ends, record, donates, meshes)) for p in choices)
    program.verify()
    _check_ordered(program)
    whole = multimesh.mesh if multimesh is not None else None
    loops = [step.loop for step in pieces.plan.steps if isinstance(step, LoopPlan)]
    firsts = [(loop, row[0]) for loop in loops for row in loop.slices]
    slices = {v: loop.sources[v] for loop, v in firsts if v in loop.sources}
    derive = functools.partial(derive_shardings, program, pieces.flat.invars, ends.given, slices, whole)
    only = divided[0] if len(divided) == 1 else None
    if only is not None and _runs_as_it_is(pieces.flat, ends, record, leaves, traced.jaxpr, only, placed):
        return Split(program, None, derive)
    asked = _asked(pieces, ends, multimesh)
    settled = _settled(pieces, ends, asked, record, leaves, traced.jaxpr, multimesh, divided)
    tied = BoundProgram(
        program=program,
        flat=pieces.flat,
        fixed=pieces.fixed,
        given=ends.given,
        settled=settled,
        asked=asked,
        held=pieces.results,
        record=record,
        traced=traced,
        multimesh=multimesh,
    )
    return Split(program, preparer(tied, leaves), derive, settled)


def _runs_as_it_is(
    flat: Flat,
    ends: InOutShardings,
    record: Record,
    leaves: Sequence[Any],
    jaxpr: Any,
    mesh: Mesh,
    placed: bool,
) -> bool:
    """Whether JAX, which runs a function where the arguments that it reads are, does what is asked.

    Args:
      mesh: the only one that the function touches.
      placed: whether something says so; else it is the default device.
    """
    groups = {frozenset(x.sharding.device_set) for x in leaves if is_committed(x)}
    if len(groups) > 1 or len(holders(mesh)) < jax.process_count():  # every process decides alike
        return False
    if any(leaf is not None and leaf.rule for leaf in (*record.inputs, *record.results)):
        return False
    if placed:
        if groups != {frozenset(mesh.devices.flat)} or not _reads_one(flat, leaves):
            return False
        if constrains(jaxpr, mesh):  # over a mesh that is larger, perhaps
            return False
    # Left to itself, XLA may shard new values of state otherwise than the old ones.
    made = {v for node in flat.nodes for v in node.outvars}
    return not any(
        leaf is not None and leaf.updates is not None and s is not None and s.num_devices > 1
        for leaf, s, v in zip(record.results, ends.asked, flat.outvars)
        if is_var(v) and v in made
    )


def _asked(pieces: _Pieces, ends: InOutShardings, multimesh: MultiMesh | None) -> list[NamedSharding | None]:
    """The sharding that each result must have; for a scalar constant, that of where steps keep a counter."""
    flat = pieces.flat
    whole = NamedSharding(multimesh.mesh, PartitionSpec()) if multimesh is not None else None
    inputs = set(flat.invars)
    return [
        whole
        if sharding is None and not held and not (is_var(v) and v in inputs) and not v.aval.shape
        else sharding
        for v, sharding, held in zip(flat.outvars, ends.asked, pieces.results)
    ]


def _settled(
    pieces: _Pieces,
    ends: InOutShardings,
    asked: Sequence[NamedSharding | None],
    record: Record,
    leaves: Sequence[Any],
    jaxpr: Any,
    multimesh: MultiMesh | None,
    divided: Sequence[Mesh],
) -> dict[int, NamedSharding]:
    """For scalars that nobody placed, and that are state, where a call leaves them.

    It is all the same to a program whether they are there or nowhere in particular, as after `nnx.Optimizer`
    or `nnx.metrics.Average` outside of `mm.jit`, unless what is called all of the MultiMesh is a task's own.
    """
    if multimesh is not None and any(m.devices.size == multimesh.mesh.devices.size for m in divided):
        return {}
    settled: dict[int, NamedSharding] = {}
    results = zip(record.results, pieces.results, asked, jaxpr.out_avals)
    for number, held, sharding, aval in (
        (leaf.updates, *rest) for leaf, *rest in results if leaf is not None
    ):
        if number is None or aval.shape or aval != jaxpr.in_avals[number]:
            continue
        if ends.given[number] is not None or is_committed(leaves[number]):
            continue
        if len(held) > 1 and multimesh is not None:
            settled[number] = NamedSharding(multimesh.mesh, PartitionSpec())
        elif sharding is not None or (held and held[0][1] in divided):
            settled[number] = sharding or NamedSharding(held[0][1], PartitionSpec())
    return settled


def _check_ordered(program: Program) -> None:
    """Refuses callbacks that are to keep an order on several meshes, which run at the same time."""
    meshes: dict[Any, dict[Mesh, None]] = {}
    for fragment in program.fragments:
        for effect in filter(_compat.is_ordered, fragment.jaxpr.effects):
            meshes.setdefault(effect, {})[fragment.mesh] = None
    for several in (found for found in meshes.values() if len(found) > 1):
        raise ValueError(
            f"callbacks with ordered=True are on {len(several)} TaskMeshes "
            f"({', '.join(program.names[mesh] for mesh in several)}), which run at the same time: leave "
            "ordered=True out, or make them all in one task"
        )


def _reads_one(flat: Flat, leaves: Sequence[Any]) -> bool:
    """Whether a result depends on an argument that is committed to its devices."""
    live = {v for v in flat.outvars if is_var(v)}
    for node in reversed(flat.nodes):
        if not live.isdisjoint(node.outvars) or (isinstance(node, Equation) and node.eqn.effects):
            live.update(filter(is_var, node.invars))
    return any(is_committed(x) and v in live for x, v in zip(leaves, flat.invars))


def _placing(record: Record) -> Iterator[tuple[Task, Mesh]]:
    """The tasks of the rules that place arguments and results, with their meshes."""
    for leaf in (*record.inputs, *record.results):
        if leaf is not None and leaf.rule is not None:
            task, sharding, _ = leaf.rule
            if task is not None and isinstance(sharding, NamedSharding):
                yield task, mesh_of(sharding)


def _with_tasks(placement: Placement, multimesh: MultiMesh | None) -> Placement:
    """Gives what follows state of a task, and is in no scope, the options of that task.

    Raises:
      ValueError: if several tasks with other options have state on the same mesh.
    """
    forget = "mm.clear_tasks()" if multimesh is None else "make the MultiMesh anew: it remembers its tasks"
    trained = {
        placement.locations[n].position for n, phase in placement.phases.items() if phase == "backward"
    }

    def task_on(mesh: Mesh) -> Task | None:
        tasks = placed_tasks(mesh, multimesh)
        for a, b in itertools.pairwise(tasks):
            if (a.remat, a.split_backprop) != (b.remat, b.split_backprop):
                raise ValueError(
                    f"{a} and {b} both have state on devices {[d.id for d in mesh.devices.flat]}, but not "
                    "the same remat and split_backprop: say what each computes with mm.task; if one is of a "
                    "model that is no more, " + forget
                )
        return dataclasses.replace(tasks[0], name=None) if len(tasks) > 1 else next(iter(tasks), None)

    positions = [
        Position(p.mesh, task_on(p.mesh)) if p.task is None and n in trained else p
        for n, p in enumerate(placement.positions)
    ]
    bodies = {loop: _with_tasks(body, multimesh) for loop, body in placement.bodies.items()}
    return dataclasses.replace(placement, positions=positions, bodies=bodies)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """A function cut up: its equations, the plan, the values that hold each result, decided shardings; and
    the inputs whose gradients are reduced in every microbatch, with the reason."""

    flat: Flat
    plan: Plan
    results: list[list[PlacedVar]]
    fixed: dict[PlacedVar, NamedSharding]
    reduced: dict[Var, str] = dataclasses.field(default_factory=dict)


def _divide(jaxpr: Any, ends: InOutShardings, task_of: TaskOf, meshes: Meshes) -> Iterator[_Pieces]:
    """A function that touches several meshes: opened, placed and cut. Loops that ask for no schedule are cut
    for the shortest one first, then for the next."""

    def task_mesh(scope: str) -> Mesh | None:
        found = task_of(scope)
        return found[1] if found is not None else None

    flat = inline_calls(jaxpr, ends.homes, task_mesh, meshes.labels(), ends.follows)
    for loop in (node for node in flat.nodes if isinstance(node, Loop)):
        for mesh_for in meshes.moving.values():
            for m in range(loop.spec.length):
                mesh_for(m)  # from here on all meshes are known
    origin = {v: at_home(home) for v, home in zip(flat.invars, ends.homes)}
    origin |= {v: FREE for v, _ in flat.constants}
    led = {v: flat.invars[n] for v, n in zip(flat.outvars, ends.follows) if n is not None and is_var(v)}
    nodes: Sequence[Node] = flat.nodes
    # Where each term of a sum is made is known when the terms are placed one by one.
    apart = split_sums(nodes, lambda loop, term: term)
    placement = place(apart, origin, task_of, led, fits)
    if apart != list(nodes):
        where = {v: o for body in placement.bodies.values() for v, o in body.where.items()}
        nodes = split_sums(nodes, lambda loop, term: where[term].home)
        placement = place(nodes, origin, task_of, led, fits)
    given = dict(zip(flat.invars, ends.given))
    for hoist in (reduce_once, gather_once):
        hoisted = hoist(nodes, placement, given)
        if hoisted != list(nodes):
            nodes = hoisted
            placement = place(nodes, origin, task_of, led, fits)
    placement = _with_tasks(placement, meshes.multimesh)
    results = _results(flat, placement, ends, meshes.tasks(), meshes.multimesh)
    sums = [item for node in nodes if isinstance(node, Loop) for item in node.undivided.items()]
    reduced = {placement.follows[v]: why for v, why in sums if v in placement.follows}
    for choice in itertools.count():
        try:
            plan = cut(nodes, placement, [h for held in results for h in held], meshes.names(), choice)
        except IndexError:
            return
        yield _Pieces(flat, plan, results, _carried(plan, placement, given, meshes.moving), reduced)


def _program(
    pieces: _Pieces, ends: InOutShardings, record: Record, donates: Sequence[bool], meshes: Meshes
) -> Program:
    """The program of a function that was cut up."""
    flat = pieces.flat
    for held, sharding in zip(pieces.results, ends.asked):
        if len(held) == 1 and sharding is not None:
            pieces.fixed.update(_ending(held[0], sharding, pieces.plan))
    inputs = dict(zip(flat.invars, ends.homes)) | {v: None for v, _ in flat.constants}
    successors = {
        flat.invars[leaf.updates]: v
        for leaf, v in zip(record.results, flat.outvars)
        if leaf is not None and leaf.updates is not None and is_var(v) and donates[leaf.updates]
    }
    program = build(pieces.plan, inputs, pieces.results, meshes.names(), meshes.moving, successors)
    number = {v: n for n, v in enumerate(flat.invars)}
    notes = tuple(
        f"the sum that updates {_parameter(record, number[v])} is reduced over its mesh in every microbatch: "
        f"{why}"
        for v, why in pieces.reduced.items()
    )
    names = dict(zip(flat.invars, record.names()))
    arguments = {slot: names.get(v, "a constant") for slot, (v, _) in program.inputs.items()}
    return dataclasses.replace(program, notes=notes, arguments=arguments)


def _parameter(record: Record, number: int) -> Leaf | None:
    """An argument; the parameter that it belongs to, if it is a slot of an optimizer."""
    leaf = record.inputs[number]
    if leaf is None or not leaf.is_optimizer_state:
        return leaf
    owners = (x for x in record.inputs if x is not None and not x.is_optimizer_state and x.within)
    return next((x for x in owners if leaf.path[-len(x.within) :] == x.within), leaf)


def _fitting(choices: Iterable[tuple[_Pieces, Program]]) -> tuple[_Pieces, Program]:
    """The first that fits the memory that its loops are given.

    Raises:
      ValueError: if none does, with the one that comes closest.
    """
    closest: list[tuple[int, str]] = []
    for pieces, program in choices:
        specs = [step.loop.spec for step in pieces.plan.steps if isinstance(step, LoopPlan)]
        limits = [spec.memory_limit for spec in specs if spec.memory_limit is not None]
        if not limits:
            return pieces, program
        mesh, most = max(program.simulate().peak_bytes.items(), key=lambda item: item[1])
        if most <= min(limits):
            return pieces, program
        names = ", ".join(repr(loop.schedule) for loop in program.loops)
        closest.append((most, f"{mesh} holds {most:,} bytes under {names}"))
        if all(spec.schedule is not None or spec.rows for spec in specs):
            break
    raise ValueError(
        f"microbatch: memory_limit={min(limits):,} bytes for one TaskMesh is too little: {min(closest)[1]}. "
        "Take smaller or fewer microbatches, remat=True, more stages, or donate state that is updated"
    )


def _results(
    flat: Flat,
    placement: Placement,
    ends: InOutShardings,
    divided: Sequence[Mesh],
    multimesh: MultiMesh | None,
) -> list[list[PlacedVar]]:
    """The values that hold each result; none for one that is an input as it came, or a constant."""
    covered = {d for m in divided for d in m.devices.flat}
    devices = set(multimesh.mesh.devices.flat) if multimesh is not None else set()
    whole = covered == devices or (covered < devices and len(divided) > 1 and jax.process_count() == 1)
    # Counters that nobody placed are computed on every mesh, so that none is ever sent.
    everywhere = divided if whole else divided[:1]
    inputs = {*flat.invars, *(v for v, _ in flat.constants)}
    results: list[list[PlacedVar]] = []
    for v, sharding, beside, scalar in zip(flat.outvars, ends.asked, ends.beside, ends.everywhere):
        if not is_var(v) or (v in inputs and sharding is None) or v.aval.dtype == jax.dtypes.float0:
            results.append([])
        elif sharding is not None:
            results.append([(v, mesh_of(sharding))])
        elif (home := placement.where[v].home) is not None:
            results.append([(v, m) for m in everywhere] if scalar and whole else [(v, home)])
        else:
            results.append([(v, m) for m in ([beside or divided[0]] if v.aval.shape else everywhere)])
    return results


def _undivided(jaxpr: Any, mesh: Mesh, names: dict[Mesh, str]) -> _Pieces:
    """A function that touches one mesh: one fragment."""
    flat = inline_calls(jaxpr, [None] * len(jaxpr.in_avals), lambda scope: None, names, loops=False)
    equations = [n for n in flat.nodes if isinstance(n, Equation)]  # which are all
    made = {v for e in equations for v in e.outvars}
    outvars = list(dict.fromkeys(v for v in flat.outvars if is_var(v) and v in made))
    read = {a for e in equations for a in e.invars if is_var(a)}
    invars = [v for v in (*flat.invars, *(c for c, _ in flat.constants)) if v in read]
    closed = _compat.close_jaxpr(invars, outvars, [localise(e.eqn, mesh) for e in equations])
    fragment = Fragment(names[mesh], names[mesh], mesh, "none", None, closed, tuple(invars), tuple(outvars))
    steps = (fragment,) if equations else ()
    plan = Plan(steps, dict.fromkeys(outvars, mesh), tuple((v, mesh) for v in invars))
    results = [[(v, mesh)] if is_var(v) and v in made else [] for v in flat.outvars]
    return _Pieces(flat, plan, results, {})


def _carried(
    plan: Plan, placement: Placement, given: dict[Var, NamedSharding | None], moving: Moves
) -> dict[PlacedVar, NamedSharding]:
    """Decides the shardings of what loops carry and slice: they must be the same for every microbatch."""
    fixed: dict[PlacedVar, NamedSharding] = {}
    for step in plan.steps:
        if not isinstance(step, LoopPlan):
            continue
        loop = step.loop

        def all_of(mesh: Mesh, length: int = loop.spec.length) -> Iterable[Mesh]:
            """The meshes that a mesh stands for."""
            return dict.fromkeys(map(moving[mesh], range(length))) if mesh in moving else [mesh]

        for i, meshes in enumerate(step.carried):
            state = placement.follows.get(loop.carries[i]) or loop.sources.get(loop.init[i])
            groups = loop.parts.get(loop.carries[i], ())
            for mesh in itertools.chain.from_iterable(map(all_of, meshes)):
                sharding = NamedSharding(mesh, PartitionSpec(*groups))
                if state is not None and state.aval.shape == loop.init[i].aval.shape[len(groups) :]:
                    own = given.get(state)
                    if own is not None and own.mesh.devices.shape == mesh.devices.shape:
                        spec = without(transferred(own, mesh).spec, set(itertools.chain(*groups)))
                        sharding = NamedSharding(mesh, PartitionSpec(*groups, *spec))
                for v in (loop.init[i], loop.carry_in[i], loop.carry_out[i], loop.carries[i]):
                    fixed[v, mesh] = sharding
        root = {v: loop.sources.get(row[0]) for row in loop.slices for v in row}
        for v, mesh in step.reads:
            if v in root:
                home = (plan.homes[v],) if v in plan.homes else ()
                for here in (*all_of(mesh), *home):
                    fixed[v, here] = entering(v.aval, here, given.get(root[v]))
    return fixed


def _ending(held: PlacedVar, sharding: NamedSharding, plan: Plan) -> dict[PlacedVar, NamedSharding]:
    """The sharding of a result, and where it is made elsewhere, the one it is sent with."""
    v, mesh = held
    home = plan.homes.get(v, mesh)
    if home == mesh:
        return {held: sharding} if mesh_of(sharding) == mesh else {}
    return {(v, home): transferred(sharding, home)} if home.devices.shape == mesh.devices.shape else {}
