"""Plans for TPUs that are not here, by their own compiler."""

from __future__ import annotations

import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.mpmd.compile import executables
from mmnnx.plan.chips import CHIPS
from mmnnx.plan.language_models import TrainingJob
from mmnnx.plan.memory import buffer_bytes, shard_bytes
from tests.test_readme import run_document

JOB = TrainingJob("tiny", "v5e:2x4", stages=4, tensor=2, batch=8, sequence=128)


@pytest.fixture(scope="module")
def plan():
    return JOB.plan()


def few(machine: str):
    """Three fragments for eight devices, the first stage's own and its second, which has an input more."""
    mesh = mm.MultiMesh(devices=mm.target(machine), axis_sizes=(2, 4), axis_names=("stage", "model"))
    first, second = (
        mm.task(lambda *xs: sum(map(jnp.sin, xs)), f"stage{n}", mesh_slice={"stage": n}) for n in range(2)
    )

    @mm.jit(mesh=mesh)
    def step(x):
        once = first(x)
        return first(once, second(once))

    return step


def plan_of(step) -> mm.Plan:
    return mm.plan(step, jax.ShapeDtypeStruct((8, 128), jnp.float32))


def test_it_fits_and_takes_its_time(plan):
    assert plan.device_kind == "TPU v5 lite" and plan.devices == 8 and plan.chip is CHIPS["v5e"]
    assert plan.fits and 0 < plan.fastest < plan.seconds < 1
    assert [m.meshes for m in plan.memory] == [(f"stage{n}",) for n in range(4)]
    for memory in plan.memory:
        weights = memory.peak_of["weights"]
        assert memory.peak_of["optimizer state"] == pytest.approx(2 * weights, rel=0.01)


def test_the_optimizer_overwrites_its_state(plan):
    for f in plan.fragments:
        if f.phase == "none" and f.alias_bytes:
            assert f.alias_bytes == pytest.approx(f.output_bytes, rel=0.05)
    assert sum(f.alias_bytes > 0 for f in plan.fragments if f.phase == "none") == 4


def test_alike_stages_are_compiled_once(plan):
    alike = {f.name: f.alike for f in plan.fragments}
    assert alike["stage1 forward"] == alike["stage2 forward"]
    assert alike["stage1 backward"] == alike["stage2 backward"]


def test_tensor_parallelism_sums_over_its_axis(plan):
    (forward,) = (f for f in plan.fragments if f.name == "stage1 forward")
    assert {(c.kind, c.axes, c.devices) for c in forward.collectives} == {("all-reduce", ("model",), 2)}


def test_its_executables_are_kept_for_the_machine(plan, tmp_path):
    plan.save(tmp_path / "step.executables")
    version, found = pickle.loads((tmp_path / "step.executables").read_bytes())
    assert version == jax.__version__ and len(found) == len({f.alike for f in plan.fragments})
    assert all(kind == "TPU v5 lite" and len(payload) > 1000 for kind, (payload, _) in found.values())
    assert {ids for _, (_, ids) in found.values()} <= {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_memory_has_the_padding_of_tiles(plan):
    """What all arguments of a fragment take together, the compiler says."""
    program, nbytes = plan.program, buffer_bytes(plan.compiled)
    logical = {s: shard_bytes(program, plan.compiled, s) for s in nbytes}
    for c in {c.fragment: c for c in program.calls}.values():
        executable = plan.compiled.executables[c.fragment]
        total = sum(nbytes[c.inputs[n]] for n in executable.inputs)
        assert total == executable.code.compiled.memory_analysis().argument_size_in_bytes
    assert sum(nbytes.values()) > sum(logical.values())


def test_weights_of_eight_bits():
    """A device holds their bytes, at a real size."""
    layers, stages, width = 4, 2, 4096

    class Layer(nnx.Module):
        def __init__(self):
            self.codes = nnx.Variable(jnp.zeros((width, width), jnp.int8))
            self.scale = nnx.Param(jnp.zeros(width, jnp.bfloat16))

        def __call__(self, x):
            return nnx.relu(x @ self.codes[...].astype(jnp.bfloat16) * self.scale[...])

    make = lambda: nnx.Sequential(*(Layer() for _ in range(layers)))
    mesh = mm.MultiMesh(devices=mm.target("v5e:2x2")[:stages], axis_sizes=(stages,), axis_names=("stage",))
    with mesh:
        model = nnx.eval_shape(make)
        placement = mm.pipeline_sharding(model, stages, layers="layers")
        grad_fn = mm.microbatch(nnx.grad(lambda model, x: model(x).sum()), dim=0, size=256, argnum=1)
        step = mm.jit(lambda model, x: grad_fn(model, x), in_shardings=(placement, None))
        plan = mm.plan(step, model, jax.ShapeDtypeStruct((1024, width), jnp.bfloat16))
    held = layers // stages * width**2
    for memory in plan.memory:
        assert held < memory.peak_of["weights"] < 1.01 * held
        assert memory.peak_of.get("temporaries", 0) < 3 * width**2  # one of them in sixteen bits


def test_it_cannot_be_called():
    with pytest.raises(ValueError, match=r"step is placed on devices that are only described \(TPU v5"):
        few("v5e:2x4")(jnp.ones((8, 128)))


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer(tmp_path):
    long = TrainingJob("tiny", "v5e:2x4", stages=2, tensor=4, batch=4, sequence=40_960, rows=2, layers=2)
    plan = long.plan()
    assert plan.fits is False and plan.overflow is not None
    assert plan.overflow.fragment == "stage0 forward"
    assert plan.overflow.needed > 5 * plan.overflow.limit
    assert "dot_general" in plan.overflow.largest[0][1]
    assert "it does not fit" in str(plan) and "stage0 forward needs" in str(plan)
    assert plan._repr_mimebundle_().keys() == {"text/plain"}
    plan.save(tmp_path / "plan.html")
    assert "stage0 forward needs" in (tmp_path / "plan.html").read_text()
    with pytest.raises(ValueError, match="train_step does not fit, so there is no picture"):
        plan.save(tmp_path / "plan.png")


@pytest.mark.parametrize("name", ["v5p:3x3x3", "v5e:2x3"])
def test_a_topology_that_there_is_not(name):
    with pytest.raises(ValueError, match=f"target '{name}': the compiler knows no such topology"):
        mm.target(name)


def test_neighbours_in_the_order_of_the_torus():
    devices = mm.target("v5p:2x2x4")
    assert len(devices) == 16 and isinstance(devices[0], jax.Device)
    assert [tuple(d.coords) for d in devices[:4]] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    job = "--target v5e:2x4 --model tiny --stages 4 --tensor 2 --batch 8 --sequence 128"
    assert main(["plan", *job.split(), "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "train_step on 8 x TPU v5 lite: it fits" in printed and "tokens/s" in printed
    assert main(["plan", "--target", "v5e:2x4", "--model", "tiny", "--stages", "3"]) == 2
    assert "v5e:2x4 has 8 devices, and stages x data x tensor = 3 x 1 x 1 = 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_picture_of_what_does_not_fit(tmp_path, capsys):
    job = "--target v5e:2x4 --model tiny --stages 2 --tensor 4 --batch 4 --sequence 32768 --rows 2"
    assert main(["plan", *job.split(), "--save", str(tmp_path / "plan.png")]) == 1
    assert "train_step does not fit, so there is no picture: .html has" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_of_the_document(tmp_path):
    printed = run_document("docs/targets.md", tmp_path).splitlines()
    assert printed[0] == "train_step on 8 x TPU v5 lite: it fits"
    fits, total, seconds = printed[-1].split()
    assert fits == "True" and 10**6 < int(total) < 10**8 and 0 < float(seconds) < 1


@pytest.mark.parametrize("name, sizes", [("v5e:4x8", (8, 4)), ("v6e:4x4", (4, 4))])
def test_a_stage_with_the_first_of_many_chips(name, sizes):
    """The compiler refuses it there."""
    mesh = mm.MultiMesh(devices=mm.target(name), axis_sizes=sizes, axis_names=("stage", "model"))
    with mesh:
        meshes = [mm.Task(f"stage{n}", mesh_slice={"stage": n}).to_mesh() for n in range(2)]
    weights = [
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(m, P("model"))) for m in meshes
    ]

    @jax.shard_map(mesh=meshes[0], in_specs=P("model"), out_specs=P())
    def sums(x):
        return jax.lax.psum(x, "model")

    with mesh:
        plan = mm.plan(mm.jit(lambda first, second: sums(first).sum() * second.sum()), *weights)
    of_each = 64 * 64 * 4 // 4 * 2  # 64 columns take the room of 128
    assert [m.peak_of["other arguments"] for m in plan.memory] == [of_each] * 2
    for fragment in plan.fragments[:2]:
        assert {(c.kind, c.axes, c.devices) for c in fragment.collectives} == {("all-reduce", ("model",), 4)}


def test_what_the_compiler_refuses_is_said(monkeypatch, compiled_anew):
    def refuse(lowered, options):
        raise jax.errors.JaxRuntimeError("INTERNAL: on platforms with limited ICI routing: no\nmore")

    monkeypatch.setattr(executables, "compile_lowered", refuse)
    with pytest.raises(RuntimeError) as error:
        plan_of(few("v5e:2x4"))
    assert re.fullmatch(
        r"the compiler refuses stage\d.*: INTERNAL: on platforms with limited ICI routing: no\. It compiles "
        "for all devices of such a machine, and for a block of at most half of them: have the axis of the "
        "stages come first in the MultiMesh",
        str(error.value),
    )


def test_which_of_the_fragments_of_one_name_is_refused(monkeypatch, compiled_anew):
    kept = executables.compile_lowered

    def refuse(lowered, options):
        if len(lowered.inputs) == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: no more")
        return kept(lowered, options)

    monkeypatch.setattr(executables, "compile_lowered", refuse)
    with pytest.raises(RuntimeError, match=r"refuses stage0 \(2\): INTERNAL: no more"):
        plan_of(few("v5e:2x4"))


def test_two_machines_in_one_process():
    """What was compiled for one is not taken for the other, though all else is equal."""
    plans = {"TPU v5 lite": plan_of(few("v5e:2x4")), "TPU v5": plan_of(few("v5p:2x2x2"))}
    for kind, found in plans.items():
        for executable in found.compiled.executables.values():
            shardings = jax.tree.leaves(executable.call.output_shardings)
            assert {d.device_kind for s in shardings for d in s.device_set} == {kind}
