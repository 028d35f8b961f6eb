"""No test leaves a registered task behind for the next one, nor random numbers that it has drawn."""

import pytest

import mmnnx as mm
from tests.multimesh import loops


@pytest.fixture(autouse=True)
def begin_anew():
    mm.clear_tasks()
    loops.RNG.bit_generator.state = loops.START
    yield
    mm.clear_tasks()
