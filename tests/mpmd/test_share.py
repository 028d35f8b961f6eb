"""The first and last stage of a pipeline run the program of those between them, and the rest beside it."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd import prepare, share
from mmnnx.mpmd.fragments import Fragment
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_parity, pipeline


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """As without JAX's cache on disk, which tests may have, and for models as small as these."""
    monkeypatch.setattr(share, "can_be_moved", lambda mesh: True)
    monkeypatch.setattr(share, "_WORTH", 10)


@functools.cache
def trained(
    blocks: tuple[int, ...],
    schedule: str = "gpipe",
    meshes: tuple[int, ...] = (0, 1, 2, 3),
    per_stage: tuple[int, ...] = (),
) -> mm.Program:
    """The program of a train step of a Transformer of so many blocks in each stage, which is right as it
    runs. Stage n is on mesh n, or as `meshes` say.
    """
    mesh, _ = pipeline(max(meshes) + 1, *per_stage)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": m}) for n, m in zip(range(len(blocks)), meshes)]
    rules: dict[Any, Any] = {mm.path("embed"): (tasks[0], P())}
    for n in range(sum(blocks)):
        task = next(t for k, t in enumerate(tasks) if n < sum(blocks[: k + 1]))
        if per_stage:
            rules[mm.path("blocks", n, {"qkv", "up"}, "kernel")] = (task, P(None, "model"))
        rules[mm.path("blocks", n)] = (task, P())
    rules |= {mm.path(name): (tasks[-1], P()) for name in ("norm", "head")}
    return assert_parity(
        make(models.Transformer, layers=sum(blocks), width=8, vocab=16),
        models.cross_entropy,
        models.tokens(8, length=4, vocab=16),
        mm.TaskSharding(rules),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=2,
    )


def parts(program: mm.Program) -> dict[str, list[Fragment]]:
    """The parts of the fragments that are divided, by what they were."""
    runs, *_ = prepare.as_it_runs(program)
    found: dict[str, list[Fragment]] = {}
    for f in runs.fragments:
        if match := re.fullmatch(r"(.*) \(\d of \d\)", f.name):
            found.setdefault(match[1], []).append(f)
    return found


def products(f: Fragment) -> int:
    return str(f.jaxpr).count("dot_general")


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("gpipe", {"stage0 forward", "stage0 backward", "stage3 forward", "stage3 backward"}),
        # The last stage's forward and backward are one program.
        ("1f1b", {"stage0 forward", "stage0 backward"}),
        (
            "zero-bubble-h1",
            {"stage0 forward", "stage0 backward-input and stage0 backward-weight", "stage3 backward-weight"},
        ),
    ],
)
def test_the_ends_are_divided(schedule, ends):
    """They do what the stages between them do and something besides, and compute what one device does."""
    divided = parts(trained((1, 1, 1, 1), schedule))
    assert divided.keys() == ends and all(len(fragments) == 2 for fragments in divided.values())


def test_stages_that_go_round_the_meshes():
    """The first of them and the last, each on a mesh with one that is between."""
    program = trained((1, 1, 1, 1), "interleaved-1f1b", (0, 1, 0, 1))
    assert len(parts(program)) >= 2


def test_a_program_that_is_divided_is_whole():
    """Parts follow each other, what was dropped still is, and each goes by the number of the whole."""
    program = trained((1, 1, 1, 1))
    runs, numbers, _ = prepare.as_it_runs(program)
    runs.verify()
    assert numbers == sorted(numbers) and {*numbers} == {*range(len(program.instructions))}
    for n, i in zip(numbers, runs.instructions, strict=True):
        assert re.sub(r" \(\d of \d\)", "", runs.describe(i)) == program.describe(program.instructions[n])
    for name, fragments in parts(program).items():
        (whole,) = (f for f in program.fragments if f.name == name)
        made = {v for f in fragments for e in f.jaxpr.eqns for v in e.outvars}
        assert made == {v for e in whole.jaxpr.eqns for v in e.outvars}


def test_the_parts_of_the_ends():
    """An embedding is looked up first, and its gradient comes last; a head is all beside the core."""
    divided = parts(trained((1, 1, 1, 1)))
    middle = 4 + 2  # products of a block: four with weights, two of attention
    assert {name: [products(f) for f in fragments] for name, fragments in divided.items()} == {
        "stage0 forward": [0, middle],
        "stage3 forward": [middle, 1],
        "stage3 backward": [2, 2 * middle],
        "stage0 backward": [2 * middle, 0],
    }


@pytest.mark.parametrize("per_stage", [(), (2,)], ids=["one device", "two devices"])
def test_the_core_is_compiled_with_the_stages_between(codes, per_stage):
    """One program for all, of each phase."""
    trained.__wrapped__((1, 1, 1, 1), "1f1b", per_stage=per_stage)
    for phase, core in {"forward": 2, "backward": 1}.items():
        same = [f"stage0 {phase} ({core} of 2)", f"stage1 {phase}", f"stage2 {phase}"]
        assert len({id(codes[name]) for name in same}) == 1


@pytest.mark.parametrize(
    ("blocks", "limits"),
    [
        pytest.param((1, 1), {}, id="no stage between the ends"),
        pytest.param((2, 1, 1, 2), {}, id="blocks that are as the others are compiled with them"),
        pytest.param((1, 1, 1, 1), {"_WORTH": 1000}, id="too little is won"),
        pytest.param((1, 1, 1, 1), {"_MOST": 100}, id="too much to compare"),
        pytest.param((1, 1, 1, 1), {"can_be_moved": lambda mesh: False}, id="no program moves"),
    ],
)
def test_what_is_left_whole(monkeypatch, blocks, limits):
    program = trained(blocks)
    for name, limit in limits.items():
        monkeypatch.setattr(share, name, limit)
    assert not parts(program)
