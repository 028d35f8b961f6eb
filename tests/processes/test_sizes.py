"""Arrays between meshes of different sizes and specs, that lie in different processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes.harness import run


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "values"
    run("sizes.py", 1, 8, str(out))
    return dict(np.load(f"{out}.0.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_meshes_of_different_sizes(count, one_process, tmp_path):
    """A stage of four devices (of two processes of four), one of two, one of one: as in one process."""
    run("sizes.py", count, 8 // count, str(tmp_path / "values"))
    assert any(name.startswith("moved") for name in one_process) and len(one_process) == 9
    for number in range(count):
        values = dict(np.load(tmp_path / f"values.{number}.npz"))
        assert values.keys() == one_process.keys()
        for name, expected in one_process.items():
            np.testing.assert_allclose(values[name], expected, rtol=2e-5, atol=1e-6, err_msg=name)
