"""Checks that tests notice seeded faults: `python -m tests.faults` makes each in a copy of the tree.

The tests that a fault names go first; only where they notice nothing is all that `make test` runs. A Markdown
table says which test failed first. The exit status is 1 if a fault was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
NAMED, WHOLE = 300, 3600  # seconds, for the tests that a fault names and for all of them
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__.splitlines()[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--list", action="store_true", help="say what the faults are, and run nothing")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help="these faults"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="where to write the table, too")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="what pytest is given, for every fault")
    options = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if fault.name in options.only]
    if options.list:
        print("\n".join(f"{fault.name} ({fault.file})\n    {fault.what}" for fault in faults))
        return 0
    rows = []
    with copied() as tree:
        tests = options.tests or [*dict.fromkeys(test for fault in faults for test in fault.tests)]
        if tests and (wrong := first_failure(tree, tests, WHOLE)):
            raise SystemExit(f"{wrong} fails without any fault")
        for fault in faults:
            with made(fault, tree):
                caught = noticed(fault, tree, options.tests)
            rows.append((fault, caught))
            print(f"{fault.name}: {caught or 'MISSED'}", flush=True)
    table = markdown(rows)
    print(f"\n{table}")
    if options.table is not None:
        options.table.write_text(f"{table}\n")
    return int(any(caught is None for _, caught in rows))


def noticed(fault: Fault, tree: Path, tests: Sequence[str] | None) -> str | None:
    """The first test that fails with a fault; None if none does."""
    if tests:
        return first_failure(tree, tests, WHOLE)
    found = first_failure(tree, ["-n", "0", *fault.tests], NAMED) if fault.tests else None
    return found or first_failure(tree, ["--ignore=tests/faults"], WHOLE)  # it looks for the old text


def first_failure(tree: Path, tests: Sequence[str], limit: float) -> str | None:
    """Runs pytest in a tree; the first test that fails, or that it did not end; None if all pass.

    Raises:
      SystemExit: if pytest has no such tests.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # what tests start ends with them
    )
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return f"no end after {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in (4, 5):  # a test was renamed, or none is left
        raise SystemExit(f"{text}\nno such tests: {' '.join(tests)}")
    if process.returncode == 0:
        return None
    found = FAILED.search(text)
    return found[1] if found else f"pytest ended with status {process.returncode}"


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mmnnx-faults-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield tree


@contextlib.contextmanager
def made(fault: Fault, tree: Path) -> Iterator[None]:
    """Makes a fault in a copy of the tree, and takes it back.

    Raises:
      SystemExit: if the text that it replaces is not there exactly once.
    """
    file = tree / fault.file
    whole = file.read_text(encoding="utf-8")
    if whole.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: its old text is {whole.count(fault.old)} times in {fault.file}")
    write(file, whole.replace(fault.old, fault.new))
    try:
        yield
    finally:
        write(file, whole)


def write(file: Path, text: str) -> None:
    """Writes Python code; what was compiled of it before may have the same time and size."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def markdown(rows: Sequence[tuple[Fault, str | None]]) -> str:
    """A table of faults, each with the test that noticed it."""
    lines = ["| fault | file | what goes wrong | noticed by |", "|---|---|---|---|"]
    for fault, caught in rows:
        where = "**MISSED**" if caught is None else caught.replace("|", "\\|")
        lines.append(f"| {fault.name} | `{fault.file}` | {fault.what} | {where} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
