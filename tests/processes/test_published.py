"""Several processes load a published model, each its own part, and write it as one."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from mmnnx.modules import LM, LMConfig, hf
from tests.processes.harness import run


@pytest.mark.slow
def test_two_processes_read_and_write_it(tmp_path):
    """Five layers, so that a scanned stack is in pieces of two sizes."""
    config = LMConfig(vocab=64, layers=5, width=16, heads=4, kv_heads=2, mlp=32)
    model = LM(config, rngs=nnx.Rngs(0))
    hf.save(model, tmp_path / "model")
    run("published.py", 2, 2, str(tmp_path / "model"), str(tmp_path))
    expected = model(np.arange(48).reshape(2, 24) % 64)
    for scan in (False, True):
        written = tmp_path / f"scan-{scan}"
        for file in (tmp_path / "model").iterdir():
            assert (written / file.name).read_bytes() == file.read_bytes()
        np.testing.assert_allclose(np.load(tmp_path / f"logits-{scan}.npy"), expected, rtol=1e-4, atol=1e-5)
        names = {"adapter_model.safetensors", "adapter_config.json"}
        assert {file.name for file in (tmp_path / f"adapter-{scan}").iterdir()} == names
