"""A few random train steps; and that the fuzz finds what is wrong, makes it small, and prints it as code."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
from hypothesis import settings

import mmnnx as mm
from mmnnx.mpmd.emit import loop
from tests.fuzz import compare
from tests.fuzz import run as runs
from tests.fuzz.case import Case
from tests.fuzz.compare import Steps, too_far
from tests.fuzz.run import as_code
from tests.fuzz.smaller import smallest

PLAIN = Case(
    nodes=(("layer", 0, 0), ("layer", 1, 1)),
    layers=("tanh", "tanh"),
    meshes=(((0,), (1, 1)), ((1, 2), (1, 2))),
    homes=(0, 1),
    styles=("replicated", "columns"),
    microbatches=2,
    schedule="1f1b",
    optimizer="momentum",
)
BUSY = Case(
    nodes=(("layer", 0, 0), ("remat", 2, 1), ("scan", (1, 0), 1), ("add", 2, 3), ("layer", 2, 4)),
    layers=("tanh", "mlp", "experts"),
    meshes=(((0, 1), (1, 2)), ((2, 3), (2, 1))),
    homes=(0, 0, 1),
    scopes=(None, 0, None, 1, None),
    styles=("replicated", "fsdp", "logical"),
    dtype="bfloat16",
    microbatches=4,
    schedule="1f1b",
    optimizer="clipped",
    route="moved",
    donate=True,
)


def test_random_steps():
    """Others at home than where it is decided whether a change is taken, which tries the same every time."""
    everything = settings.get_current_profile_name() == "all"
    seed = 0 if os.environ.get("CI") else random.randrange(1000)
    assert runs.run(examples=8 if everything else 1, seed=seed)["wrong"] == 0


def test_wrong_values_are_found(monkeypatch):
    class FirstSlice(loop._BodyValues):
        """Every microbatch reads the first slice of the batch."""

        def __init__(self, *args):
            super().__init__(*args)
            self.slices = {v: [row[0]] * len(row) for v, row in self.slices.items()}

    monkeypatch.setattr(loop, "_BodyValues", FirstSlice)
    wrong = Steps(PLAIN).mistakes()
    assert any("loss" in text for text in wrong) and any("gradients" in text for text in wrong)


def test_wrong_shardings_are_found(monkeypatch):
    monkeypatch.setattr(mm.TaskSharding, "lookup_optimizer_state", lambda *_: None)
    wrong = Steps(dataclasses.replace(PLAIN, route="moved with optimizer")).mistakes()
    assert wrong and all("opt_state.0.trace.layers.1.linear" in text for text in wrong)


def test_what_the_mistake_does_without_goes():
    case = smallest(BUSY, lambda case: "experts" in case.layers and case.route == "moved")
    small = Case((("layer", 0, 0),), ("experts",), homes=(0,), styles=("replicated",), route="moved")
    assert case == small
    assert eval(repr(case)) == small


@pytest.mark.slow
def test_a_step_that_is_wrong_is_printed_as_small_as_it_can_be(monkeypatch, capsys):
    def wrong(case):
        if case.schedule is not None:
            raise runs.Refused
        return ["loss: 2 for 3"] if "mlp" in case.layers else []

    monkeypatch.setattr(runs, "mistakes", wrong)
    counts = runs.run(examples=100, seed=7)
    text = capsys.readouterr().out
    assert counts.total() == 100 and min(counts["equal"], counts["wrong"], counts["refused"]) > 0
    assert as_code(Case((("layer", 0, 0),), ("mlp",), homes=(0,), styles=("replicated",))) in text
    assert text.splitlines()[-1].startswith(
        f"100 train steps: {counts['equal']} equal, {counts['wrong']} wrong"
    )


def test_what_is_rounding_of_bfloat16():
    error = compare.BFLOAT16
    assert not too_far({"rounded": (3 * error, error, 1.0), "both are far": (0.5, 0.3, 1.0)})
    (text,) = too_far({"a": (0.05, 0.01, 1.0)})
    assert text == "a: 0.05 from the truth, allowed 0.0356; nnx.jit is 0.01"


@pytest.mark.slow
def test_a_schedule_that_turns_the_order_of_a_sum_is_refused():
    """Two stages of one mesh add to one gradient; "wavefront" runs the backwards last first."""
    case = Case(
        nodes=(("layer", 0, 0), ("scan", (1, 0), 1), ("layer", 1, 1), ("remat", 1, 3)),
        layers=("tanh", "conv"),
        meshes=(((0, 1, 2, 3), (2, 2)), ((4, 5, 6, 7), (2, 2)), ((7,), (1, 1))),
        tasks=(0, 1, 2),
        homes=(0, 2),
        scopes=(0, None, 0, 0),
        styles=("replicated", "replicated"),
        dtype="bfloat16",
        microbatches=2,
        schedule="wavefront",
    )
    waits = r"backward \(stage 2\) of microbatch 1 waits for task0 backward \(stage 0\) of microbatch 0"
    with pytest.raises(runs.Refused, match=waits):
        runs.mistakes(case)
    assert runs.mistakes(dataclasses.replace(case, schedule="gpipe")) == []
