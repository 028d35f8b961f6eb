"""mypy and pyright see the types of mmnnx, and refuse what calls.py says they have to."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("checker", ["pyright", pytest.param("mypy", marks=pytest.mark.slow)])
def test_type_checkers(checker):
    calls = "tests/typing/calls.py"
    options = {"pyright": ["--pythonpath", sys.executable, "--warnings", calls], "mypy": [calls]}
    done = subprocess.run(
        [sys.executable, "-m", checker, *options[checker]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
