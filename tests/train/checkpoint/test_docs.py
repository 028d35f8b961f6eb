"""The program of docs/checkpoints.md runs as written, and does what the text says."""

from __future__ import annotations

import json

import pytest

from mmnnx.train.checkpoint.inspect_cli import run
from tests.test_readme import run_document


@pytest.mark.slow
def test_the_program(tmp_path, capsys):
    printed = run_document("docs/checkpoints.md", tmp_path)
    assert "kept: [3, 4] latest 4 best 4" in printed
    assert "restored step 4 {'next_index': 4}" in printed
    assert "not in the checkpoint: model.layers (8 arrays); did you mean model.blocks?" in printed
    assert "left as it was: ['model.head.bias', 'model.head.kernel']" in printed
    assert "['model', 'optimizer'] (16, 16)" in printed
    assert run(["--json", str(tmp_path / "run")], print) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["mesh"], found["data"]) == (4, {"stage": 4, "model": 2}, {"next_index": 4})
