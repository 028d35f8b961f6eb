"""The first and last stage of a pipeline run the program of those between them, and the rest beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd import prepare, share
from mmnnx.mpmd.fragments import Fragment
from mmnnx.mpmd.merge import merge
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_parity, pipeline

INSIDE = ("forward", "backward")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """As without JAX's cache on disk, which tests have, and for models as small as these."""
    monkeypatch.setattr(share, "can_be_moved", lambda mesh: True)
    monkeypatch.setattr(share, "_WORTH", 10)


def trained(blocks: Sequence[int], meshes: Sequence[int] = (), per_stage: Sequence[int] = (), **options: Any):
    """The program of a train step of a Transformer of so many blocks in each stage, which is right as it
    runs. Stage n is on mesh n, or as `meshes` say.
    """
    meshes = meshes or range(len(blocks))
    mesh, _ = pipeline(max(meshes) + 1, *per_stage)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": m}) for n, m in enumerate(meshes)]
    rules: dict[Any, Any] = {mm.path("embed"): (tasks[0], P())}
    for n in range(sum(blocks)):
        task = next(t for k, t in enumerate(tasks) if n < sum(blocks[: k + 1]))
        if per_stage:
            rules[mm.path("blocks", n, {"qkv", "up"}, "kernel")] = (task, P(None, "model"))
        rules[mm.path("blocks", n)] = (task, P())
    rules |= {mm.path(name): (tasks[-1], P()) for name in ("norm", "head")}
    placement = mm.TaskSharding(rules)
    options = {"schedule": "1f1b", "steps": 1, **options}
    net = make(models.Transformer, layers=sum(blocks), width=8, vocab=16, **options.pop("model", {}))
    batch = models.tokens(8, length=4, vocab=16)
    return assert_parity(net, models.cross_entropy, batch, placement, mesh=mesh, microbatch=2, **options)


def parts(program: mm.Program) -> dict[str, list[Fragment]]:
    """The parts of the fragments that are divided, by what they were."""
    shared, _, _ = share.share(program)
    found: dict[str, list[Fragment]] = {}
    for f in shared.fragments:
        if match := re.fullmatch(r"(.*) \(\d of \d\)", f.name):
            found.setdefault(match[1], []).append(f)
    return found


def products(f: Fragment) -> int:
    return str(f.jaxpr).count("dot_general")


CASES = {
    "gpipe": {},
    "1f1b": {},
    "eager-1f1b": {},
    "zero-bubble-h1": {},
    "interleaved-1f1b": {"meshes": (0, 1, 0, 1)},
}


@pytest.mark.parametrize("schedule", CASES)
def test_parity_at_every_schedule(schedule):
    """Both ends do what the stages between them do and more, and compute what one device does."""
    program = trained([1, 1, 1, 1], schedule=schedule, steps=2, **CASES[schedule])
    divided = parts(program)
    for phase in ("forward", "backward"):
        assert sum(len(fs) == 2 for name, fs in divided.items() if f" {phase}" in name) >= 2


def test_a_program_that_is_divided_is_whole():
    """Parts follow each other, what was dropped still is, and each goes by the number of the whole."""
    program = trained([1, 1, 1, 1])
    shared, numbers, cores = share.share(program)
    shared.verify()
    assert len(cores) == 4 and numbers == sorted(numbers)
    assert {*numbers} == {*range(len(program.instructions))}
    for n, i in zip(numbers, shared.instructions):
        assert re.sub(r" \(\d of \d\)", "", shared.describe(i)) == program.describe(program.instructions[n])
    for name, fragments in parts(program).items():
        (whole,) = (f for f in program.fragments if f.name == name)
        made = {v for f in fragments for e in f.jaxpr.eqns for v in e.outvars}
        assert made == {v for e in whole.jaxpr.eqns for v in e.outvars}
    merged, firsts = merge(shared, cores)
    merged.verify()
    assert cores <= {*merged.fragments} and len(firsts) < len(numbers)  # the head's two are one


def test_the_parts_of_the_ends():
    """An embedding is looked up first and its gradient comes last; the head is all between two cores."""
    divided = parts(trained([1, 1, 1, 1]))
    middle = 4 + 2  # products of a block: four of weights, two of attention
    assert {name: [products(f) for f in fs] for name, fs in divided.items()} == {
        "stage0 forward": [0, middle],
        "stage3 forward": [middle, 1],
        "stage3 backward": [2, 2 * middle],
        "stage0 backward": [2 * middle, 0],
    }


@pytest.mark.parametrize("per_stage", [(), (2,)], ids=["one device", "two devices"])
def test_the_ends_compile_little_of_their_own(monkeypatch, compiled_anew, per_stage):
    """The cores are compiled with the stages between the ends: one program for the four, of each phase."""
    codes: dict[str, Any] = {}
    compile_program = prepare.compile_program

    def watched(*args):
        compiled = compile_program(*args)
        codes.update((f.name, e.code) for f, e in compiled.executables.items())
        return compiled

    monkeypatch.setattr(prepare, "compile_program", watched)
    trained([1, 1, 1, 1], per_stage=per_stage)
    for phase, ends in {"forward": (2, 1), "backward": (1, 2)}.items():
        same = [f"stage0 {phase} ({ends[0]} of 2)", f"stage1 {phase}", f"stage3 {phase} ({ends[1]} of 2)"]
        assert len({id(codes[name]) for name in same}) == 1


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        pytest.param([1, 1], {}, id="no stage between the ends"),
        pytest.param([2, 1, 1, 2], {}, id="blocks more that are as the others"),
    ],
)
def test_what_would_not_be_worth_it_is_left_whole(blocks, options):
    assert not parts(trained(blocks, **options))
