"""The programs of the documents run as written, and the README's learns something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmnnx.mpmd.ir.placement import Reason
from tests.environment import environment

ROOT = Path(__file__).parent.parent


def run_document(name: str, folder: Path, **variables: str) -> str:
    """What the Python of a document prints, all of its pieces being one program."""
    text = (ROOT / name).read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^\d+ (\d+\.\d+)$", printed, flags=re.MULTILINE)]


def test_the_program_of_the_readme(tmp_path):
    """It is short, learns something, and draws what the page shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = run_document("README.md", tmp_path)
    losses = losses_in(printed)
    assert len(losses) == 20 and losses[-1] < losses[0] / 5, losses
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 20
    shown = re.search(r"```\n(zero-bubble-h1\nstage0 .*?)```", text, flags=re.DOTALL)
    assert shown and printed.endswith(shown[1])


@pytest.mark.slow
def test_the_picture_of_the_readme(tmp_path):
    command = [sys.executable, ROOT / "docs/pictures/first.py", tmp_path]
    subprocess.run(command, env=environment() | {"PYTHONPATH": str(ROOT)}, check=True)
    for name in ("first.png", "first-dark.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_program_about_placement(tmp_path):
    printed = run_document("docs/placement.md", tmp_path)
    losses = losses_in(printed)
    assert len(losses) == 20 and losses[-1] < losses[0] - 1, losses
    assert all(f"stage{i}" in printed for i in range(4))


@pytest.mark.slow
def test_the_program_about_modules(tmp_path):
    printed = run_document("docs/modules.md", tmp_path)
    loss, text = re.findall(r"^(\d\.\d+) b'(.*)'$", printed, flags=re.MULTILINE)[0]
    assert float(loss) < 0.3 and text in "the quick brown fox jumps over the lazy dog. " * 2
    assert "SquaredLM" in printed and "P(None, model)" in printed


HOW_TO = {  # what each prints, somewhere
    "bring-a-model": r"Total Parameters: 3,232",
    "choose-a-schedule": r"1f1b +bubble 27%, in flight \{'stage0': 4, .*\nzero-bubble-h1 +bubble 1\d%",
    "debug-a-placement": r"no filter places layers\.0\.bias",
    "plan-a-pod": r"8 x TPU v5 lite: it fits",
    "port-from-multimesh": r"^1\.\d{4} \[\[0, 1, 2, 3\], \[4, 5, 6, 7\]\]$",
    "port-from-nnx-jit": r"^(0\.\d{6})\d* \1\d*$",
    "save-and-resume": r"^100 \{'next_index': 3200\} True$",
    "several-hosts": r"^0\.\d+$",
    "several-models": r"^ teacher1 +student1 +float32\[2,16,256\] +4 [^\n]*\n(?:.*\n)+?5\.\d+$",
    "tensor-and-experts": r"^P\('expert', None, 'model'\)$",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", HOW_TO)
def test_the_program_of_how_to(page, tmp_path):
    assert re.search(HOW_TO[page], run_document(f"docs/how-to/{page}.md", tmp_path), flags=re.MULTILINE)


def test_each_how_to_is_run_and_is_short():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/how-to").glob("*.md")}
    assert pages.keys() == HOW_TO.keys()
    assert all(len(text.splitlines()) < 90 for text in pages.values())


@pytest.mark.slow
def test_the_program_about_schedules(tmp_path):
    """Zero-bubble h1 on 4 stages and 8 microbatches: (P - 1) / (3 M + P - 1) is 3 / 27."""
    printed = run_document("docs/schedules.md", tmp_path)
    assert printed.startswith("11.1% {'stage0': 4, 'stage1': 4, 'stage2': 4, 'stage3': 4}")
    assert (tmp_path / "zero-bubble-h1.svg").read_text().startswith("<?xml")
    assert (tmp_path / "schedule.csv").read_text().startswith("0F0,0F1,0F2,0F3,0I0,0W0,")


@pytest.mark.slow
def test_the_program_about_scanned_stacks(tmp_path):
    *losses, spec = run_document("docs/scanned-stacks.md", tmp_path).splitlines()
    assert spec == "P('stage', None, 'model')" and len(losses) == 3
    assert float(losses[0].split()[1]) > float(losses[2].split()[1])


@pytest.mark.slow
def test_the_program_about_published_models(tmp_path):
    printed = run_document("docs/published-models.md", tmp_path).splitlines()
    assert printed[3] == "LM 8" and len(printed) == 7
    for losses in (printed[:3], printed[4:]):  # of all weights; of additions to weights of eight bits
        assert float(losses[0].split()[1]) > float(losses[2].split()[1])
    assert (tmp_path / "tiny-llama-tuned/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "learned"), [("third-party-models", 0.1), ("keras-models", 0.5)])
def test_the_program_with_a_model_of_another_package(page, learned, tmp_path):
    """As a pipeline it learns what it learns whole, to the figures that the document shows."""
    printed = run_document(f"docs/{page}.md", tmp_path).splitlines()
    losses = [[float(loss) for loss in line.split()[1:]] for line in printed]
    split, whole = zip(*losses)
    assert len(split) == 10 and split[-1] < learned * split[0]
    assert split == pytest.approx(whole, abs=2e-5)
    blocks = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split("```\n")
    (shown,) = (block for block in blocks if block.startswith("0 "))
    for step, *figures in (line.split() for line in shown.splitlines() if line != "..."):
        assert [float(figure) for figure in figures] == pytest.approx(losses[int(step)], abs=1e-3)


@pytest.mark.slow
def test_the_program_that_generates(tmp_path):
    assert run_document("docs/generation.md", tmp_path) == "True\n"


@pytest.mark.slow
def test_the_programs_written_for_multimesh(tmp_path):
    printed = run_document("docs/multimesh.md", tmp_path).splitlines()
    assert printed[:2] == ["P('model',) [0, 1, 2, 3]", "P(None, 'model') [4, 5, 6, 7]"]
    assert "[[0, 1, 2, 3], [4, 5, 6, 7]]" in printed
    losses = [float(line) for line in printed[-4:]]  # of three steps, and after them
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0]


def unnumbered(text: str) -> str:
    """Without the numbers of variables: another JAX may make an equation more."""
    return re.sub(r"\bv\d+", "v", text)


def test_every_reason_has_a_line():
    """In the table of how-it-works, with files that give it."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    _, after = text.split("## Why an equation is on a mesh\n")
    rows = re.findall(r"^\| ([^|]*) \| [^|]* \| ([^|]*) \|$", after.split("\n## ")[0], flags=re.MULTILINE)
    assert [reason for reason, _ in rows[1:]] == [reason.value for reason in Reason]
    for (_, files), reason in zip(rows[1:], Reason):
        for file in re.findall(r"`([^`]*)`", files):
            path = ROOT / "mmnnx/mpmd" / (file if "/" in file else f"place/{file}")
            assert f"Reason.{reason.name}" in path.with_suffix(".py").read_text(encoding="utf-8"), reason


def test_the_dumps_and_the_files_of_how_it_works(tmp_path):
    """The dumps say what the document shows of them, and it names the files of each stage."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    run_document("docs/how-it-works.md", tmp_path, MMNNX_DUMP=str(tmp_path / "dump"))
    sections = re.findall(r"^### (\S+\.txt).*?\n(.*?)(?=^##)", text, flags=re.DOTALL | re.MULTILINE)
    dumped = {path.name: path.read_text() for path in (tmp_path / "dump/001-step").iterdir()}
    assert {name for name, _ in sections} | {"5-hoist.txt"} == dumped.keys()
    for name, section in sections:
        shown = [
            line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()
        ]
        assert shown
        for line in shown:
            known = re.split(r"(?<=\S)  +(?!@|#)", line)[0]  # without a remark
            assert unnumbered(known) in unnumbered(dumped[name]), line
    _, files = text.split("## Which file does what")
    for folder, named in re.findall(
        r"^- \*\*(\w+)\*\*: (.*?)(?=^- |^## )", files, flags=re.DOTALL | re.MULTILINE
    ):
        there = {p.stem for p in (ROOT / "mmnnx/mpmd" / folder).glob("*.py")} - {"__init__"}
        if folder == "schedule":  # each schedule is a file, which the page does not list
            there -= {
                p.stem for p in (ROOT / "mmnnx/mpmd/schedule").glob("*.py") if "@register" in p.read_text()
            }
        assert there == set(re.findall(r"`(\w+)`", named)) & there, folder
