"""`MMNNX_DUMP`: what each stage handed on, as text."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.ir.dump import STAGES, Dump
from tests.mpmd.parity import pipeline, place

mesh, tasks = pipeline(2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def step(model, x):
    grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
    loss, grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, schedule="zero-bubble-h1")(model, x)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return loss


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """The files of one call, by stage."""
    root = tmp_path_factory.mktemp("dump")
    with mesh, pytest.MonkeyPatch.context() as patch:
        model = mm.jit(lambda: Net(nnx.Rngs(0)), out_shardings=place(tasks, ["first"], ["second"]))()
        patch.setenv("MMNNX_DUMP", str(root))
        mm.jit(step)(model, jnp.ones((6, 4)))
    (folder,) = root.iterdir()
    assert re.fullmatch(r"\d{3}-step", folder.name)
    return {path.stem.split("-")[1]: path.read_text() for path in sorted(folder.iterdir())}


def test_each_stage_writes_its_file(dumped):
    """`divide` only where something is divided."""
    assert tuple(dumped) == tuple(stage for stage in STAGES if stage != "divide")


def test_what_is_divided(tmp_path, monkeypatch):
    """A batch over the axis of stages is taken for divided state at first: that is one function."""
    monkeypatch.setenv("MMNNX_DUMP", str(tmp_path))
    over_stages = jax.NamedSharding(mesh.mesh, jax.P("stage"))
    x = jax.device_put(jnp.ones((2, 4)), over_stages)
    with mesh:
        make = mm.jit(lambda: nnx.Param(jnp.ones((2, 4))), out_shardings=mm.TaskSharding({...: tasks}))
        mm.jit(lambda w: 2 * w[...])(make())
        mm.jit(lambda x: jnp.sort(x, axis=0))(x)
    first, second, third = sorted(tmp_path.iterdir())
    assert (first / "2-divide.txt").exists() and (third / "1-frontend.txt").exists()
    text = (second / "2-divide.txt").read_text()
    assert "argument 0.[0:1]: float32[1,4]" in text and "float32[2,4]" not in text


def test_where_arguments_live_and_results_go(dumped):
    assert "0.second.kernel: float32[8,2], P() on stage1\n" in dumped["frontend"]
    assert "0.second.kernel: float32[8,2], P() on stage1, follows 0.second.kernel" in dumped["frontend"]


def test_a_variable_has_one_name_in_all_files(dumped):
    """What a stage does not change is the same line, but for the place."""
    (line,) = re.findall(r"^ *v\d+:float32\[2,8\] = tanh v\d+", dumped["inline"], flags=re.MULTILINE)
    for stage in ("place", "hoist", "partition"):
        assert line.strip() in dumped[stage]
    assert f"{line}  @ stage0, forward 0" in dumped["place"]


def test_every_equation_has_a_mesh_and_a_phase(dumped):
    placed = re.findall(r"@ (\w+), (forward|backward|none)", dumped["place"])
    assert {mesh for mesh, _ in placed} == {"stage0", "stage1"}
    assert {phase for _, phase in placed} == {"forward", "backward", "none"}


def test_fragments_and_the_order_of_the_loop(dumped):
    assert "fragment 'stage0 backward-weight' on stage0, position 0" in dumped["partition"]
    rows = re.findall(r"^row \d.*: (.*)$", dumped["schedule"], flags=re.MULTILINE)
    assert len(rows) == 2 and all(row.count("W") == 3 == row.count("F") for row in rows)
    assert dumped["emit"].startswith("Program: ")


def test_nothing_is_written_without_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MMNNX_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    with mesh:
        mm.jit(lambda: Net(nnx.Rngs(1)), out_shardings=place(tasks, ["first"], ["second"]))()
    assert not any(tmp_path.iterdir())


def test_each_process_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMNNX_DUMP", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert Dump.of("step").folder.parent == tmp_path / "process1"
