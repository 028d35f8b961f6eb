"""bfloat16 over meshes: no further from what float32 gives than nnx.jit on one device is."""

import dataclasses

import pytest

from tests.fuzz.case import Case
from tests.fuzz.compare import Steps, too_far

CHAIN = Case(
    nodes=(("layer", 0, 0), ("layer", 1, 1), ("layer", 2, 2), ("layer", 0, 3)),
    layers=("mlp", "where", "cond"),
    meshes=(((0,), (1, 1)), ((1,), (1, 1)), ((2,), (1, 1))),
    tasks=(0, 1, 2),
    homes=(0, 1, 2),
    styles=("columns", "rows", "logical"),
    dtype="bfloat16 weights",
    microbatches=3,
    schedule="1f1b",
)
SHARDED = tuple(((2 * n, 2 * n + 1), (1, 2)) for n in range(3))


def test_a_cut_loses_no_bits():
    """What is sent has the dtype that it had, and sums over microbatches are of float32."""
    errors = Steps(CHAIN).errors(draws=5)
    gradients = {path: error for path, error in errors.items() if "gradients" in path}
    assert all(0 < whole < true for _, whole, true in gradients.values())
    lost = {path: error for path, error in gradients.items() if error[0] > 1.5 * error[1]}
    assert not lost


@pytest.mark.slow
def test_sums_of_partial_sums_are_rounded_once_more_and_no_worse():
    assert not too_far(Steps(dataclasses.replace(CHAIN, meshes=SHARDED)).errors(draws=9))
