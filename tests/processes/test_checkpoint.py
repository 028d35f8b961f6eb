"""Checkpoints of one process, of two and of four: each restores what the others saved."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmnnx.train.checkpoint import Checkpoints
from tests.processes.harness import run
from tests.train.states import assert_equal, born, losses, values


@pytest.fixture
def of_one(tmp_path):
    """The mesh and the nodes of which a checkpoint of one process is saved in the folder "one"."""
    folder, (mesh, nodes) = tmp_path / "one", born("4x2", seed=0)
    losses(mesh, nodes)
    with mesh, Checkpoints(folder) as checkpoints:
        checkpoints.save(1, nodes, data={"next_index": 3}, metrics={"loss": 0.5})
    np.savez(folder / "values.npz", **values(nodes))
    (folder / "losses.json").write_text(json.dumps(losses(mesh, nodes)))
    return mesh, nodes


@pytest.mark.slow
def test_one_and_two_processes(tmp_path, of_one):
    """To the last bit, each process reading its own part alone; next losses; orbax's one set of files."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    full = ["full", "4x2", str(tmp_path / "full")]
    execute(2, [["restore", "4x2", one], ["save", "4x2", two], ["abstract", "8x1", two], full])
    placement = json.loads((tmp_path / "two" / "2" / "placement" / "placement.json").read_text())
    assert placement["processes"] == 2
    check(tmp_path / "two", *of_one)


@pytest.mark.slow
def test_four_processes(tmp_path, of_one):
    """In "2x4" a stage spans two of them, in "8x1" a process has two stages. All tell of a damaged file."""
    one, two, four, damaged = (str(tmp_path / name) for name in ("one", "two", "four", "damaged"))
    execute(2, [["restore", "4x2", one], ["save", "4x2", two]])
    shutil.copytree(two, damaged)
    break_one(tmp_path / "damaged" / "2" / "state")
    todo = [["restore", "2x4", one], ["restore", "8x1", one], ["restore", "8x1", two]]
    execute(4, [*todo, ["save", "2x4", four], ["damaged", "2x4", damaged]])
    told = [(tmp_path / "damaged" / f"told.{number}").read_text() for number in range(4)]
    assert all("cannot be read" in text and "no other good checkpoint" in text for text in told), told
    execute(2, [["restore", "4x2", four]])
    check(tmp_path / "four", *of_one)


@pytest.mark.slow
def test_processes_that_have_different_numbers_of_devices(tmp_path, of_one):
    """They wait for each other through the coordinator: a collective of all devices would not do."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    execute(2, [["restore", "8x1", one], ["save", "8x1", two]], devices=(2, 6))
    check(tmp_path / "two", *of_one)


def check(folder, mesh, nodes):
    """What several processes saved is restored by one, on one device and on several."""
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["2"]
    for where in (born("1x1", seed=2), (mesh, nodes)):
        Checkpoints(folder).restore(where[1])
        assert_equal(dict(np.load(folder / "values.npz")), values(where[1]))
        expected = json.loads((folder / "losses.json").read_text())
        np.testing.assert_allclose(losses(*where), expected, rtol=1e-5)


def execute(count, todo, devices=None):
    printed = run("checkpoint.py", count, devices or 8 // count, json.dumps(todo), timeout=300)
    assert all(text.count(f"process {number}: ") == len(todo) for number, text in enumerate(printed))


def break_one(state):
    """Flips bits in the middle of each file of the second process: not all of one need be in use."""
    for file in (state / "ocdbt.process_1" / "d").iterdir():
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
        file.write_bytes(content)
