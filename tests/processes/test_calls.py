"""Several functions over the same state, in two processes of which one is slow: as in one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes.harness import run


@pytest.mark.slow
def test_functions_in_turn(tmp_path):
    """State that one call has sent and the next donates, results of one function twice, counters of
    optax.MultiSteps, weak types, arrays without elements, and what each process has of its own."""
    found = []
    for count in (1, 2):
        run("calls.py", count, 4 // count, str(tmp_path / f"of{count}"))
        found += [dict(np.load(tmp_path / f"of{count}.{number}.npz")) for number in range(count)]
    alone = found[0]
    assert len(alone) > 30
    for values in found[1:]:
        assert values.keys() == alone.keys()
        for name, expected in alone.items():
            np.testing.assert_allclose(values[name], expected, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_stacks_of_layers(tmp_path):
    """State that spans processes, and comes back from a checkpoint in the same pieces."""
    for count in (1, 2):
        run("stacks.py", count, 4 // count, str(tmp_path / f"of{count}"))
    alone = np.load(tmp_path / "of1.0.npz")
    for number in range(2):
        values = np.load(tmp_path / f"of2.{number}.npz")
        assert sorted(values) == sorted(alone) and len(values) > 20
        for name in alone:
            np.testing.assert_allclose(values[name], alone[name], rtol=2e-5, atol=1e-6, err_msg=name)
            if name.startswith("restored"):
                np.testing.assert_array_equal(values[name], values[name.replace("restored", "trained")])


@pytest.mark.slow
def test_meshes_that_share_devices(tmp_path):
    """Programs that both processes run together never wait for each other in a circle, nor for a thread."""
    for count in (1, 2):
        run("shared.py", count, 4 // count, str(tmp_path / f"of{count}"))
    alone = np.load(tmp_path / "of1.0.npz")
    for number in range(2):
        values = np.load(tmp_path / f"of2.{number}.npz")
        assert sorted(values) == sorted(alone)
        for name in alone:
            np.testing.assert_allclose(values[name], alone[name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_whiles(tmp_path):
    """Every process learns whether a loop goes on, if it has a part in it, whoever computes that."""
    for count in (1, 2):
        run("whiles.py", count, 6 // count, str(tmp_path / f"of{count}"))
    alone = np.load(tmp_path / "of1.0.npz")
    assert alone["count"] == 3
    for number in range(2):
        values = np.load(tmp_path / f"of2.{number}.npz")
        assert sorted(values) == sorted(alone)
        for name in alone:
            np.testing.assert_allclose(values[name], alone[name], rtol=2e-5, atol=1e-6, err_msg=name)
