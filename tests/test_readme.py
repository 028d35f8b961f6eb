"""The programs of the documents run as written, and the README's learns something."""

import re
import subprocess
import sys
from pathlib import Path

from tests.environment import environment

ROOT = Path(__file__).parent.parent


def run_document(name: str, folder: Path) -> str:
    """What the Python of a document prints, all of its pieces being one program."""
    text = (ROOT / name).read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_program_of_the_readme(tmp_path):
    printed = run_document("README.md", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^\d+ (\d+\.\d+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1, losses
    assert all(f"stage{i}" in printed for i in range(4))
    loss, text = re.findall(r"^(\d\.\d+) b'(.*)'$", printed, flags=re.MULTILINE)[0]
    assert float(loss) < 0.3 and text in "the quick brown fox jumps over the lazy dog. " * 2
    assert "SquaredLM" in printed and "P(None, model)" in printed


def test_the_program_about_schedules(tmp_path):
    """Zero-bubble h1 on 4 stages and 8 microbatches: (P - 1) / (3 M + P - 1) is 3 / 27."""
    printed = run_document("docs/schedules.md", tmp_path)
    assert printed.startswith("11.1% {'stage0': 4, 'stage1': 4, 'stage2': 4, 'stage3': 4}")
    assert (tmp_path / "zero-bubble-h1.svg").read_text().startswith("<?xml")
    assert (tmp_path / "schedule.csv").read_text().startswith("0F0,0F1,0F2,0F3,0I0,0W0,")


def test_the_programs_written_for_multimesh(tmp_path):
    printed = run_document("docs/multimesh.md", tmp_path).splitlines()
    assert printed[:2] == ["P('model',) [0, 1, 2, 3]", "P(None, 'model') [4, 5, 6, 7]"]
    assert "[[0, 1, 2, 3], [4, 5, 6, 7]]" in printed
    losses = [float(line) for line in printed[-4:]]  # of three steps, and after them
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0]


def test_the_program_about_how_it_works(tmp_path):
    """It prints the instructions that the document shows, and all files of `mpmd` are explained there."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    instruction = r"^ +\d+  (.+? on .*?|send .*? -> \w)(?: \(devices|[:,]|   |$)"
    shown, printed = (
        re.findall(instruction, t, flags=re.MULTILINE)
        for t in (text, run_document("docs/how-it-works.md", tmp_path))
    )
    assert len(shown) == 16 and shown == printed
    _, passes = text.split("## From the user's function to a program")
    files = {p.stem for p in (ROOT / "mmnnx/mpmd").glob("*.py")} - {"__init__"}
    assert files == set(re.findall(r"`(\w+)`", passes)) & files
