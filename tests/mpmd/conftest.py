"""No test leaves a registered task behind for the next one; `mode` and `codes` are there for all of them."""

from typing import Any

import pytest

import mmnnx as mm
from mmnnx.mpmd.runtime import prepare
from tests.mpmd.modes import mode  # noqa: F401


@pytest.fixture(autouse=True)
def no_registered_tasks():
    mm.clear_tasks()
    yield
    mm.clear_tasks()


@pytest.fixture
def codes(monkeypatch, compiled_anew, no_folder):
    """What is compiled of each fragment, by name; what is compiled for several is one object."""
    codes: dict[str, Any] = {}
    compile_program = prepare.compile_program

    def watched(*args):
        compiled = compile_program(*args)
        codes.update((f.name, e.code) for f, e in compiled.executables.items())
        return compiled

    monkeypatch.setattr(prepare, "compile_program", watched)
    return codes
