"""The notebooks run from start to end, and are committed with what they print and draw."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.environment import flags
from tests.slow import all_but

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What the outputs of a cell are; what it prints counts once."""
    found = [o.get("name") or max(o["data"]) for o in cell.get("outputs", ())]
    return [kind for n, kind in enumerate(found) if kind not in found[:n] or kind not in ("stdout", "stderr")]


def said(cell: nbformat.NotebookNode) -> str:
    """What a cell prints and shows as text, but for numbers, which are of one machine and one run."""
    texts = [o.get("text") or o["data"].get("text/plain", "") for o in cell.get("outputs", ())]
    return re.sub(r"[+-]?\d[\d.,]*(e[+-]?\d+)?", "0", " ".join("".join(texts).split()))


def committed(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_what_it_shows(path):
    cells = committed(path).cells
    assert any(c.get("outputs") for c in cells)
    assert not any({"stderr", "error"} & {*kinds(c)} for c in cells), "nothing warns"
    assert not any(c.cell_type == "code" and c.execution_count is None for c in cells), "all of it was run"


@pytest.mark.parametrize(
    "path", all_but([p for p in NOTEBOOKS if p.stem.startswith("2-")], NOTEBOOKS), ids=lambda path: path.stem
)
def test_it_runs_and_shows_what_it_showed(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags())  # a notebook makes its own devices
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = committed(path)
    NotebookClient(run, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds(c) for c in run.cells] == [kinds(c) for c in committed(path).cells]
    assert [said(c) for c in run.cells] == [said(c) for c in committed(path).cells]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 7
