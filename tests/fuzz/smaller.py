"""The smallest case that is still wrong: what it does without goes, one thing at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.graph import OPERATIONS, Node, inputs, layers_of

PLAIN = {
    field.name: field.default
    for field in dataclasses.fields(Case)
    if field.name
    in (
        "scopes",
        "frozen",
        "data",
        "donate",
        "route",
        "optimizer",
        "reduce",
        "output",
        "again",
        "dtype",
        "schedule",
        "per_call",
    )
}
PLAINER = {"where": "add", "stop": "norm"}


def smallest(case: Case, is_wrong: Callable[[Case], bool], tries: int = 100) -> Case:
    """The last of a series of wrong cases, each a bit smaller than the one before."""
    found = True
    while found:
        found = False
        for candidate in smaller(case):
            if tries == 0:
                return case
            tries -= 1
            if is_wrong(candidate):
                case, found = candidate, True
                break
    return case


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those first that leave out most."""
    if case.microbatches:
        yield dataclasses.replace(case, microbatches=0, schedule=None, per_call=1, reduce="mean", data=False)
    for n in reversed(range(len(case.nodes))):
        if len(case.nodes) > 1:
            yield without_node(case, n)
    for name, plain in PLAIN.items():
        if getattr(case, name) != plain:
            yield dataclasses.replace(case, **{name: plain})
    if case.microbatches > 2:
        yield dataclasses.replace(case, microbatches=2, per_call=min(case.per_call, 2))
    for name in ("scopes", "styles"):
        values, plain = getattr(case, name), None if name == "scopes" else "replicated"
        for n, value in enumerate(values):
            if value != plain:
                yield dataclasses.replace(case, **{name: (*values[:n], plain, *values[n + 1 :])})
    for n, node in enumerate(case.nodes):
        if node[0] not in OPERATIONS:
            layers = layers_of(node)
            plainer = ("layer", layers[0], inputs(node)[0]) if layers else (PLAINER[node[0]], *inputs(node))
            yield with_used_layers(case, (*case.nodes[:n], plainer, *case.nodes[n + 1 :]), case.scopes)
    for n, kind in enumerate(case.layers):
        if kind != "tanh":
            yield dataclasses.replace(case, layers=(*case.layers[:n], "tanh", *case.layers[n + 1 :]))
    if len(case.tasks) > 2:
        yield with_tasks(case, case.tasks[:-1])
    if case.tasks != tuple(range(len(case.tasks))):
        yield with_tasks(case, tuple(dict.fromkeys(case.tasks)))
    if max(case.tasks) < len(case.meshes) - 1:
        yield dataclasses.replace(case, meshes=case.meshes[:-1])
    ones = tuple(((n,), (1, 1)) for n in range(len(case.meshes)))
    if case.meshes != ones:
        yield dataclasses.replace(case, meshes=ones)
    for n, mesh in enumerate(case.meshes):
        if mesh != ones[n]:
            yield dataclasses.replace(case, meshes=(*case.meshes[:n], ones[n], *case.meshes[n + 1 :]))
    for n, home in enumerate(case.homes):
        if home:
            yield dataclasses.replace(case, homes=(*case.homes[:n], 0, *case.homes[n + 1 :]))


def without_node(case: Case, n: int) -> Case:
    """Who read its result reads what it read first."""
    instead = inputs(case.nodes[n])[0]
    number = lambda result: instead if result == n + 1 else result - (result > n + 1)
    left = [node for m, node in enumerate(case.nodes) if m != n]
    nodes = tuple((*node[: -len(inputs(node))], *map(number, inputs(node))) for node in left)
    return with_used_layers(case, nodes, tuple(s for m, s in enumerate(case.scopes) if m != n))


def with_tasks(case: Case, tasks: tuple[int, ...]) -> Case:
    """The case with fewer tasks; what was in others is in the last."""
    last = len(tasks) - 1
    return dataclasses.replace(
        case,
        tasks=tasks,
        homes=tuple(min(home, last) for home in case.homes),
        scopes=tuple(None if scope is None else min(scope, last) for scope in case.scopes),
    )


def with_used_layers(case: Case, nodes: tuple[Node, ...], scopes: tuple[Any, ...]) -> Case:
    """The case with these nodes, and the layers that they have."""
    used = sorted({k for node in nodes for k in layers_of(node)}) or [0]
    number = {k: n for n, k in enumerate(used)}

    def renumbered(node: Node) -> Node:
        match node:
            case ("layer" | "remat" as what, k, a):
                return (what, number[k], a)
            case ("scan" | "cond" as what, ks, a):
                return (what, tuple(number[k] for k in ks), a)
        return node

    return dataclasses.replace(
        case,
        nodes=tuple(map(renumbered, nodes)),
        scopes=scopes,
        frozen=tuple(number[k] for k in case.frozen if k in number),
        **{name: tuple(getattr(case, name)[k] for k in used) for name in ("layers", "homes", "styles")},
    )
