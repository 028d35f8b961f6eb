"""The notebooks run from start to end, and are committed with what they print and draw."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.environment import flags

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What the outputs of a cell are; what it prints counts once."""
    found = [o.get("name") or max(o["data"]) for o in cell.get("outputs", ())]
    return [kind for n, kind in enumerate(found) if kind not in found[:n] or kind not in ("stdout", "stderr")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_showed(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags())  # a notebook makes its own devices
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    committed = nbformat.read(path, as_version=4)
    nbformat.validate(committed)
    run = nbformat.read(path, as_version=4)
    NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds(c) for c in run.cells] == [kinds(c) for c in committed.cells]
    assert not any("stderr" in kinds(c) for c in run.cells), "nothing warns"
    assert any(c.get("outputs") for c in committed.cells), "committed with outputs"


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 7
