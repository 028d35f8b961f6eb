"""Runs random cases, makes those that are wrong small, and counts."""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections import Counter

import hypothesis
import jax

from tests.fuzz.case import Case, cases
from tests.fuzz.compare import Steps
from tests.fuzz.smaller import smallest

REFUSED = re.compile(r"schedule '[\w-]+' (is for|needs)|per_call=\d, but")
SHRUNK = 3  # of a kind of mistake are made small
PATIENCE = 300  # seconds for each
EVERY = 25  # examples, after which what was compiled is forgotten


class Refused(Exception):
    """The schedule of a case is not for its stages, or its microbatches have to run one by one."""


def mistakes(case: Case) -> list[str]:
    """What is wrong with a case; what is raised, too.

    Raises:
      Refused: nothing is: its schedule is not for such stages.
    """
    try:
        return Steps(case).mistakes()
    except Exception as error:
        if isinstance(error, ValueError) and REFUSED.search(str(error)):
            raise Refused(str(error)) from None
        return [f"{type(error).__name__}: {error}"]


def kind(wrong: list[str]) -> str:
    """What goes wrong, without where: numbers and names are left out."""
    raised = re.match(r"\w+: .{,60}", wrong[0]) if wrong[0].split(":")[0].endswith("Error") else None
    what = raised[0] if raised else re.split(r"[:\[]", wrong[0], maxsplit=1)[0]
    return re.sub(r"[\d.]+|'[^']*'", "", what)


def run(examples: int, seed: int, verbose: bool = False) -> Counter[str]:
    """Tries so many cases; returns how many were equal, wrong, and refused by their schedules."""
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    networks = set()
    parent = multiprocessing.parent_process()
    began = time.monotonic()

    def is_wrong_so(case: Case, what: str) -> bool:
        try:
            wrong = mistakes(case)
        except Refused:
            return False
        return bool(wrong) and kind(wrong) == what

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def each(case: Case) -> None:
        hypothesis.assume(case.nodes not in networks)  # it makes many that are nearly alike
        networks.add(case.nodes)
        if parent is not None and not parent.is_alive():
            raise SystemExit("who started this is gone")
        if verbose:
            print(case, flush=True)
        try:
            wrong = mistakes(case)
        except Refused:
            counts["refused"] += 1
        else:
            counts["wrong" if wrong else "equal"] += 1
            if wrong:
                report(case, wrong)
        if counts.total() % EVERY == 0:
            jax.clear_caches()
            gc.collect()
            print(summary(counts, time.monotonic() - began), flush=True)

    def report(case: Case, wrong: list[str]) -> None:
        what = kind(wrong)
        kinds[what] += 1
        print("\n".join(["", *wrong[:10], as_code(case), ""]), flush=True)
        if kinds[what] <= SHRUNK:
            until = time.monotonic() + PATIENCE
            case = smallest(case, lambda case: time.monotonic() < until and is_wrong_so(case, what))
            print("\n".join(["made smaller:", *mistakes(case)[:10], as_code(case), ""]), flush=True)

    each()
    print(summary(counts, time.monotonic() - began))
    return counts


def as_code(case: Case) -> str:
    """A test to paste."""
    return "\n".join(
        [
            "from tests.fuzz.case import Case",
            "from tests.fuzz.compare import Steps",
            "",
            f"case = {case!r}",
            "assert not Steps(case).mistakes()",
        ]
    )


def summary(counts: Counter[str], seconds: float) -> str:
    each = seconds / max(counts.total(), 1)
    return (
        f"{counts.total()} train steps: {counts['equal']} equal, {counts['wrong']} wrong, "
        f"{counts['refused']} refused by their schedule; {seconds:.0f} s, {each:.1f} s each"
    )
