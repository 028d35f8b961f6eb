"""What several processes train together is what one process trains."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.processes.harness import finish, run, start

# Stages of two devices, of four (which span two of four processes), and of one.
CONFIGS = ("4x2 1f1b", "2x4 zero-bubble-h1", "8x1 gpipe")


# Each of four processes holds a stage, half of one, or two; of two processes, two.
@pytest.mark.slow
@pytest.mark.parametrize("count, configs", [(2, CONFIGS[:1]), (4, CONFIGS[1:2]), (4, CONFIGS)])
def test_processes_train_as_one_does(count, configs, tmp_path):
    """Losses, parameters, statistics, counters and optimizer state, as every process fetches them."""
    run("train.py", 1, 8, str(tmp_path / "one"), *configs)
    expected = dict(np.load(tmp_path / "one.0.npz"))
    for printed in run("train.py", count, 8 // count, str(tmp_path / "values"), *configs):
        assert "mmnnx: " not in printed  # they end together, which is no failure
    for number in range(count):
        values = dict(np.load(tmp_path / f"values.{number}.npz"))
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
            assert values[name].dtype == value.dtype


def test_processes_that_build_different_programs_say_where():
    """Each raises, none hangs, and all name the same line."""
    results = finish(start("differ.py", 2, 1), timeout=120)
    for number, (status, printed) in enumerate(results):
        assert status != 0
        differ = (
            r"processes 0 and 1 have built different programs: line \d+ is '.*mul a 1\.0.*' in process 0, "
            r"and '.*mul a 2\.0.*' in process 1\. Every process"
        )
        assert re.search(f"process {number} raised: {differ}", printed), printed
        assert re.search(f"mmnnx: process [01] .* raised .*{differ}", printed), printed
