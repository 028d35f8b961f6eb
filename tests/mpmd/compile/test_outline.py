"""The first and last stage of a pipeline run the program of those between them, and the rest beside it."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.mpmd.compile import outline, outline_split
from mmnnx.mpmd.compile.rewrites import rewrite
from mmnnx.mpmd.emit.merge import merge
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call
from tests import models
from tests.models import make
from tests.mpmd.parity import ADAMW, assert_parity, born, born_with_optimizer, pipeline, train_step
from tests.slow import all_but


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """As without JAX's cache on disk, which tests may have, and for models as small as these."""
    monkeypatch.setattr(outline, "loads_on_other_meshes", lambda mesh: True)
    monkeypatch.setattr(outline, "_WORTH", 10)


def on_stages(
    blocks: tuple[int, ...], meshes: tuple[int, ...] = (0, 1, 2, 3), per_stage: tuple[int, ...] = ()
) -> tuple[mm.MultiMesh, mm.TaskSharding]:
    """A MultiMesh, and a Transformer's placement on stages of so many blocks."""
    mesh, _ = pipeline(max(meshes) + 1, *per_stage)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": m}) for n, m in zip(range(len(blocks)), meshes)]
    rules: dict[Any, Any] = {mm.path("embed"): (tasks[0], P())}
    for n in range(sum(blocks)):
        task = next(t for k, t in enumerate(tasks) if n < sum(blocks[: k + 1]))
        if per_stage:
            rules[mm.path("blocks", n, {"qkv", "up"}, "kernel")] = (task, P(None, "model"))
        rules[mm.path("blocks", n)] = (task, P())
    rules |= {mm.path(name): (tasks[-1], P()) for name in ("norm", "head")}
    return mesh, mm.TaskSharding(rules)


@functools.cache
def trained(
    blocks: tuple[int, ...],
    schedule: str = "gpipe",
    meshes: tuple[int, ...] = (0, 1, 2, 3),
    per_stage: tuple[int, ...] = (),
    per_call: int = 1,
) -> mm.Program:
    """The program of a train step of a Transformer of so many blocks in each stage, which is right as it
    runs. Stage n is on mesh n, or as `meshes` say.
    """
    mesh, placement = on_stages(blocks, meshes, per_stage)
    return assert_parity(
        make(models.Transformer, layers=sum(blocks), width=8, vocab=16),
        models.cross_entropy,
        models.tokens(8, length=4, vocab=16),
        placement,
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        per_call=per_call,
        steps=2,
        whole_batch=False,
    )


@functools.cache
def untrained(blocks: tuple[int, ...], schedule: str = "gpipe") -> mm.Program:
    """The program of such a step, which is not run."""
    mesh, placement = on_stages(blocks)
    make_model = make(models.Transformer, layers=sum(blocks), width=8, vocab=16)
    with mesh:
        arguments = *born_with_optimizer(make_model, placement, ADAMW), models.tokens(8, length=4, vocab=16)
        step = train_step(mm.jit, models.cross_entropy, microbatch=2, schedule=schedule)
        return step.program(*arguments)


def parts(program: mm.Program) -> dict[Fragment, list[Fragment]]:
    """The parts of each fragment that is divided, after calls were merged as they are when it runs."""
    merged, _ = merge(program)
    runs, numbers = outline.outline(merged)
    found: dict[Fragment, dict[Fragment, None]] = {}
    for n, i in zip(numbers, runs.instructions, strict=True):
        if isinstance(i, Call) and (whole := merged.instructions[n].fragment) is not i.fragment:
            found.setdefault(whole, {})[i.fragment] = None
    return {whole: [*divided] for whole, divided in found.items()}


def products(f: Fragment) -> int:
    return str(f.jaxpr).count("dot_general")


# Gradients that begin as zeros, and what updates the weights.
ONCE = ["stage0", "stage0", "stage3", "stage3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "per_call", "ends"),
    [
        ("gpipe", 1, ["stage0 backward", "stage0 forward", "stage3 backward", "stage3 forward"]),
        # The last stage's forward and backward are one program, but for what the other backwards do.
        ("1f1b", 1, ["stage0 backward", "stage0 forward", "stage3 forward and stage3 backward"]),
        # What several microbatches share is divided as it is for one.
        ("1f1b", 2, ["stage0 backward", "stage0 forward", "stage3 forward and stage3 backward"]),
        (
            "zero-bubble-h1",
            1,
            [
                "stage0 backward-input and stage0 backward-weight",
                "stage0 forward",
                "stage3 backward-weight",
                "stage3 forward and stage3 backward-input",
            ],
        ),
    ],
)
def test_the_ends_are_divided(schedule, per_call, ends):
    """They do what the stages between them do and something besides, and compute what one device does."""
    divided = parts(trained((1, 1, 1, 1), schedule, per_call=per_call))
    assert sorted(f.name for f in divided) == sorted(ONCE + ends)
    assert all(len(fragments) == 2 for fragments in divided.values())


@pytest.mark.slow
def test_stages_that_go_round_the_meshes():
    """The first of them and the last, each on a mesh with one that is between."""
    program = trained((1, 1, 1, 1), "interleaved-1f1b", (0, 1, 0, 1))
    assert len(parts(program)) >= 2


@pytest.mark.slow
def test_a_program_that_is_divided_is_whole():
    """Parts follow each other, what was dropped still is, and each goes by the number of the whole."""
    program = trained((1, 1, 1, 1))
    rewritten = rewrite(program)
    runs, numbers = rewritten.program, rewritten.numbers
    runs.verify()
    assert numbers == sorted(numbers) and {*numbers} == {*range(len(program.instructions))}
    for n, i in zip(numbers, runs.instructions, strict=True):
        assert re.sub(r" \(\d of \d\)", "", runs.describe(i)) == program.describe(program.instructions[n])
    for whole, fragments in parts(program).items():
        made = {v for f in fragments for e in f.jaxpr.eqns for v in e.outvars}
        assert made == {v for e in whole.jaxpr.eqns for v in e.outvars}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble-h1"])
def test_a_part_returns_what_is_read(schedule):
    """No result is made for nobody: each is one of the whole, or what a later part takes."""
    for whole, fragments in parts(trained((1, 1, 1, 1), schedule)).items():
        for n, f in enumerate(fragments, start=1):
            assert {*f.outvars} <= {*whole.outvars, *(v for later in fragments[n:] for v in later.invars)}
        assert sum(len({*f.outvars} & {*whole.outvars}) for f in fragments) == len({*whole.outvars})


@pytest.mark.slow
def test_the_parts_of_the_ends():
    """An embedding is looked up first, and its gradient comes last; a head is all beside the core."""
    middle = 4 + 2  # products of a block: four with weights, two of attention
    counts = {
        schedule: {f.name: [products(p) for p in fragments] for f, fragments in divided.items()}
        for schedule in ("gpipe", "1f1b")
        for divided in [parts(untrained((1, 1, 1, 1), schedule))]
    }
    assert counts["1f1b"]["stage3 forward and stage3 backward"] == [middle + 1 + 2, 2 * middle]
    assert counts["gpipe"] == {name: [0, 0] for name in ONCE} | {
        "stage0 forward": [0, middle],
        "stage3 forward": [middle, 1],
        "stage3 backward": [2, 2 * middle],
        "stage0 backward": [2 * middle, 0],
    }


@pytest.mark.slow
@pytest.mark.parametrize("per_stage", [(2,), ()])
def test_the_core_is_compiled_with_the_stages_between(codes, per_stage):
    """One program for all, of each phase."""
    trained.__wrapped__((1, 1, 1, 1), "1f1b", per_stage=per_stage)
    forward, backward = (
        [f"stage0 {phase} ({core} of 2)", f"stage1 {phase}", f"stage2 {phase}"]
        for phase, core in {"forward": 2, "backward": 1}.items()
    )
    for same in (forward, [*backward, "stage3 forward and stage3 backward (2 of 2)"]):
        assert len({id(codes[name]) for name in same}) == 1


@pytest.mark.slow
def test_the_optimizers_of_the_ends_are_compiled_with_those_between(codes):
    """What is left of them comes first, so that the core may give up the same buffers everywhere."""
    divided = parts(trained.__wrapped__((1, 1, 1, 1)))
    for end in ("stage0", "stage3"):
        update = max((f for f in divided if f.name == end), key=lambda f: len(f.jaxpr.eqns))
        assert [p.name for p in divided[update]] == [f"{end} (1 of 2)", f"{end} (2 of 2)"]
    assert codes["stage0 (2 of 2)"] is codes["stage1"] is codes["stage2"] is codes["stage3 (2 of 2)"]


@pytest.mark.slow
def test_the_optimizers_of_a_language_model():
    """A norm after the last block is updated as one in it is, in the midst of the block's weights: which of
    the equations are the block's is known by what they read alone.
    """
    config = LMConfig(vocab=24, layers=4, width=16, heads=2, mlp=32)
    mesh, _ = pipeline(4)

    def create():
        return LM(config, rngs=nnx.Rngs(0))

    def step(model, optimizer, tokens):
        grad_fn = nnx.grad(lambda model, tokens: model.loss(tokens))
        grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1)(model, tokens)
        optimizer.update(model, grads)

    with mesh:
        model = nnx.eval_shape(create)
        placement = mm.pipeline_sharding(model, 4)
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(create(), optax.adam(1e-3), wrt=nnx.Param))
        step = mm.jit(step, in_shardings=(placement, None, None))
        program = step.program(model, optimizer, np.zeros((4, 5), np.int32))
    updates = {f.name: f for f in program.fragments if "sqrt" in str(f.jaxpr) and f.phase == "none"}
    assert sorted(updates) == ["stage0", "stage1", "stage2", "stage3"]
    divided = parts(program)
    for end in ("stage0", "stage3"):
        core = divided[updates[end]][-1]
        assert len(core.jaxpr.eqns) == len(updates["stage1"].jaxpr.eqns)


@pytest.mark.parametrize("reads", all_but([False], [True, False]))
def test_what_calls_the_host_is_left_whole(reads):
    """Such as for a learning rate. It cannot be compiled for another mesh, and is asked for once on each."""
    asked: list[int] = []

    def rate(*counts: Any) -> np.float32:
        asked.append(len(counts))
        return np.float32(0.1)

    def optimizer(model: nnx.Module) -> nnx.Optimizer:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        schedule = optax.adam(lambda count: jax.pure_callback(rate, shape, *[count] * reads))
        return nnx.Optimizer(model, schedule, wrt=nnx.Param)

    @mm.jit
    def step(model, optimizer, batch):
        grads = mm.microbatch(nnx.grad(models.cross_entropy), dim=0, size=2, argnum=1)(model, batch)
        optimizer.update(model, grads)

    mesh, placement = on_stages((1, 1, 1, 1))
    with mesh:
        model = born(make(models.Transformer, layers=4, width=8, vocab=16), placement)
        arguments = model, optimizer(model), models.tokens(8, length=4, vocab=16)
        divided = parts(step.program(*arguments))
        step(*arguments)
        jax.block_until_ready(nnx.state(model))
    assert divided and not [f for f in divided if "callback" in str(f.jaxpr)]
    assert asked == [reads] * 4


@pytest.mark.parametrize(
    ("made", "free"),
    [
        (lambda x: x[:, None], True),
        (lambda x: jnp.squeeze(x[None]), True),
        (lambda x: jnp.ravel(x), False),  # of a weight that is sharded, an all-gather
        (lambda x: jnp.broadcast_to(x, (2, *x.shape)), False),
        (lambda x: x * 2, False),
    ],
)
def test_what_each_part_makes_anew(made, free):
    eqns = jax.make_jaxpr(made)(jnp.zeros((4, 6))).jaxpr.eqns
    assert all(map(outline_split._takes_no_work, eqns)) == free


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"_WORTH": 1000, "_WORTH_ONCE": 1000}, id="too little is won"),
        pytest.param({"_MOST_PAIRS": 0}, id="too much to compare"),
        pytest.param({"loads_on_other_meshes": lambda mesh: False}, id="no program moves"),
    ],
)
def test_what_is_left_whole(monkeypatch, limits):
    program = trained((1, 1, 1, 1))
    for name, limit in limits.items():
        monkeypatch.setattr(outline, name, limit)
    assert not parts(program)


@pytest.mark.slow
def test_no_stage_between_the_ends():
    assert not parts(untrained((1, 1)))


@pytest.mark.slow
def test_blocks_that_are_as_the_others_are_compiled_with_them():
    """A stage of two of them holds no more kinds of operations than one does: only what goes on beside it,
    once a step, is worth a call."""
    assert {f.name for f in parts(trained((2, 1, 1, 2)))} <= {*ONCE}
