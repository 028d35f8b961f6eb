"""No test leaves a registered task behind for the next one; `mode` is there for all of them."""

import pytest

import mmnnx as mm
from tests.mpmd.modes import mode  # noqa: F401


@pytest.fixture(autouse=True)
def no_registered_tasks():
    mm.clear_tasks()
    yield
    mm.clear_tasks()
