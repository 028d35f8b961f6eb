"""Checkpoints of one process, of two and of four: each restores what the others saved."""

from __future__ import annotations

import json
import shutil

import numpy as np

from mmnnx.train.checkpoint import Checkpoints
from tests.processes.harness import run
from tests.train.states import assert_equal, born, losses, values


def test_one_two_and_four_processes(tmp_path):
    """To the last bit, each process reading its own part alone; next losses; orbax's one set of files.

    In "2x4" of four processes a stage spans two of them, in "8x1" a process has two stages.
    """
    mesh, nodes = born("4x2", seed=0)
    losses(mesh, nodes)
    of_one = tmp_path / "one"
    with mesh, Checkpoints(of_one) as checkpoints:
        checkpoints.save(1, nodes, data={"next_index": 3}, metrics={"loss": 0.5})
    np.savez(of_one / "values.npz", **values(nodes))
    (of_one / "losses.json").write_text(json.dumps(losses(mesh, nodes)))

    folders = {name: str(tmp_path / name) for name in ("one", "two", "four", "damaged")}
    restore = [["restore", grid, folders["one"]] for grid in ("4x2", "2x4", "8x1")]
    execute(2, [restore[0], ["save", "4x2", folders["two"]], ["abstract", "8x1", folders["two"]]])
    shutil.copytree(tmp_path / "two", tmp_path / "damaged")
    placement = json.loads((tmp_path / "damaged" / "2" / "placement" / "placement.json").read_text())
    assert placement["processes"] == 2
    break_one(tmp_path / "damaged" / "2" / "state")
    todo = [
        *restore[1:],
        ["restore", "8x1", folders["two"]],
        ["save", "2x4", folders["four"]],
        ["damaged", "2x4", folders["damaged"]],
    ]
    execute(4, todo)
    told = [(tmp_path / "damaged" / f"told.{number}").read_text() for number in range(4)]
    assert all("cannot be read" in text and "no other good checkpoint" in text for text in told), told
    execute(2, [["restore", "4x2", folders["four"]]])

    for name in ("two", "four"):
        folder = tmp_path / name
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["2"]
        for grid in ("1x1", "4x2"):
            mesh, nodes = born(grid, seed=2) if grid == "1x1" else (mesh, nodes)
            Checkpoints(folder).restore(nodes)
            assert_equal(dict(np.load(folder / "values.npz")), values(nodes))
            expected = json.loads((folder / "losses.json").read_text())
            np.testing.assert_allclose(losses(mesh, nodes), expected, rtol=1e-5)


def execute(count, todo):
    printed = run("checkpoint.py", count, 8 // count, json.dumps(todo), timeout=300)
    assert all(text.count(f"process {number}: ") == len(todo) for number, text in enumerate(printed))


def break_one(state):
    """Flips bits in the middle of the largest file of the second process."""
    file = max((state / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    file.write_bytes(content)
