"""Tiny models that `transformers` has made, in a Python of its own (`make test-hf`)."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

PYTHON = pathlib.Path(__file__).parents[2] / ".venv-hf/bin/python"
SCRIPT = pathlib.Path(__file__).with_name("reference.py")


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> pathlib.Path:
    """A folder with a folder for each model."""
    folder = tmp_path_factory.mktemp("published")
    transformers(folder)
    return folder


def transformers(folder: pathlib.Path, *options: str) -> None:
    """Runs `reference.py`."""
    done = subprocess.run([PYTHON, SCRIPT, folder, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
