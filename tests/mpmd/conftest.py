"""No test leaves a registered task behind for the next one."""

import pytest

import mmnnx as mm


@pytest.fixture(autouse=True)
def no_registered_tasks():
    mm.clear_tasks()
    yield
    mm.clear_tasks()
