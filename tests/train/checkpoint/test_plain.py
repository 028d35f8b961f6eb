"""A checkpoint is plain: orbax alone reads it, JSON says where things were, `mmnnx inspect` prints it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.checkpoint.inspect_cli import run
from tests.train.states import Net, placed, values

PLAIN = """
import sys, numpy as np, jax, orbax.checkpoint as ocp
found = ocp.PyTreeCheckpointer().restore(sys.argv[1])
assert "mmnnx" not in sys.modules and jax.device_count() == 1
flat = {}
for path, x in jax.tree_util.tree_leaves_with_path(found):
    assert type(x) is np.ndarray, path
    flat["/".join(key.key for key in path)] = x
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
for again in ((like,), ()):
    again = ocp.StandardCheckpointer().restore(sys.argv[1], *again)
    jax.tree.map(np.testing.assert_array_equal, found, again)
np.savez(sys.argv[2], **flat)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    mesh, sharding = placed("4x2")
    with mesh, Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        model = mm.jit(lambda: Net(0), out_shardings=sharding)()
        nodes = {"model": model, "rngs": nnx.Rngs(3)}
        for step in (1, 2):
            checkpoints.save(step, nodes, data={"next_index": 5}, metrics={"loss": 2.5})
    return folder, nodes


def test_a_script_without_mmnnx(saved, tmp_path):
    """By the paths of state, to the last bit, on one device; the model alone too."""
    folder, nodes = saved
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    state = str(folder / "checkpoints" / "2" / "state")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, state, str(tmp_path / "found.npz")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "found.npz"))
    expected = values(nodes)
    assert "model/blocks/0/kernel" in found and found.keys() == expected.keys()
    for name, x in expected.items():
        assert x.tobytes() == found[name].tobytes(), name


def test_orbax_restores_part_of_it_onto_devices(saved):
    """Each device its shard, as of any other checkpoint of its own."""
    folder, nodes = saved
    mesh = jax.make_mesh((8,), ("all",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    like = {"model": {"embed": {"embedding": jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=sharding)}}}
    with ocp.PyTreeCheckpointer() as reader:
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        found = reader.restore(
            folder / "checkpoints" / "2" / "state",
            args=ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True),
        )
    embedding = found["model"]["embed"]["embedding"]
    assert embedding.sharding == sharding
    np.testing.assert_array_equal(embedding, nodes["model"].embed.embedding[...])


def test_the_placement_beside_it(saved):
    folder, _ = saved
    placement = json.loads((folder / "checkpoints" / "2" / "placement" / "placement.json").read_text())
    assert placement["versions"]["jax"] == jax.__version__ and placement["processes"] == 1
    assert placement["mesh"] == {"stage": 4, "model": 2}
    kernel = placement["state"]["model/blocks/3/kernel"]
    home = placement["homes"][kernel.pop("home")]
    assert kernel == {"shape": [8, 8], "dtype": "float32", "bytes": 256, "spec": [None, "model"]}
    assert home == {"task": "stage3", "axes": {"stage": 1, "model": 2}, "devices": [6, 7]}
    assert placement["state"]["rngs/default/key"]["dtype"] == "key<fry>"


def inspect(capsys, *options) -> tuple[int, str, str]:
    told: list[str] = []
    status = run(list(map(str, options)), told.append)
    return status, capsys.readouterr().out, "\n".join(told)


def test_inspect(saved, capsys, tmp_path):
    """A run, a folder of checkpoints, or one: with nothing there but the metadata."""
    folder, _ = saved
    for name in ("1", "2"):
        for about in ("placement", "metrics", "data"):
            (tmp_path / "run" / "checkpoints" / name / about).mkdir(parents=True)
            part = f"checkpoints/{name}/{about}/{about}.json"
            (tmp_path / "run" / part).write_text((folder / part).read_text())
        part = f"checkpoints/{name}/_CHECKPOINT_METADATA"
        (tmp_path / "run" / part).write_text((folder / part).read_text())
    for path, step in (("run", 2), ("run/checkpoints", 2), ("run/checkpoints/1", 1)):
        status, printed, told = inspect(capsys, tmp_path / path)
        assert (status, told) == (0, "")
        assert f"step {step}; there are also {3 - step}\n" in printed
        assert "mesh stage=4, model=2" in printed and "metrics loss=2.5" in printed
        assert "data next_index=5" in printed and f"jax {jax.__version__}" in printed
        (row,) = (line for line in printed.splitlines() if line.startswith(" model.blocks.3.kernel"))
        assert " ".join(row.split()) == "model.blocks.3.kernel float32[8,8] 256 B stage3 P(None, model)"
        (row,) = (line for line in printed.splitlines() if line.startswith(" stage3"))
        assert "6-7" in row
        assert "key<fry>[]" in printed
    status, printed, _ = inspect(capsys, "--json", tmp_path / "run")
    found = json.loads(printed)
    assert found["step"] == 2 and found["steps"] == [1, 2] and found["metrics"] == {"loss": 2.5}
    assert {piece["path"]: piece["type"] for piece in found["state"]}["model/norm/scale"] == "float32[8]"


def test_inspect_what_orbax_alone_wrote(capsys, tmp_path):
    state = {"params": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "steps": [np.zeros(4, np.int32), 7]}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "plain", state)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(3, args=ocp.args.Composite(net=ocp.args.StandardSave(state)))
    for path, name in (("plain", ""), ("managed", "net.")):
        status, printed, told = inspect(capsys, tmp_path / path)
        assert (status, told) == (0, ""), told
        assert f" {name}params.w" in printed and "bfloat16[2,3]" in printed and f" {name}steps.0" in printed


SAID = {
    "nothing": "does not exist",
    "empty": "there is no checkpoint in",
    "file": "is a file: a checkpoint is a folder",
    "half": "is empty or incomplete",
    "damaged": "placement",
}


@pytest.mark.parametrize("what", SAID)
def test_inspect_what_is_no_checkpoint(saved, capsys, tmp_path, what):
    path = tmp_path / what
    if what in ("empty", "half"):
        path.mkdir()
    if what == "file":
        path.write_text("")
    if what == "half":
        (path / "3").mkdir()
    if what == "damaged":
        (path / "3" / "placement").mkdir(parents=True)
        about = {"custom_metadata": {"checksums": {"placement": 1}}}
        (path / "3" / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
        (path / "3" / "placement" / "placement.json").write_text('{"state": {}}')
    status, printed, told = inspect(capsys, path)
    assert status == 2 and not printed and str(path) in told and SAID[what] in told and "\n" not in told
