"""What only `make test-all` runs: cases like others of the same test, and more of slow random examples."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def all_but(kept: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that are not kept are slow; one of several arguments is a tuple."""
    return [case if case in kept else _slow(case if isinstance(case, tuple) else (case,)) for case in cases]


def few(count: int) -> Any:
    """`make test` runs `count` of the cases of a test, spread evenly; the others become slow."""
    return pytest.mark.few(count)


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Marks what `few` leaves to `make test-all`, among all cases that were collected."""
    of_test: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
            continue
        if item.get_closest_marker("few"):
            of_test[item.parent, item.originalname].append(item)
    for cases in of_test.values():
        (count,) = cases[0].get_closest_marker("few").args
        kept = {n * len(cases) // count for n in range(count)}
        for n, case in enumerate(cases):
            if n not in kept:
                case.add_marker(pytest.mark.slow)


def grid(*axes: Sequence[Any], step: int = 1) -> list[Any]:
    """Every combination of the axes' values.

    `make test` runs as many as the longest axis has values, and each value is in one of them; the others are
    slow. With a `step` it runs one in so many of them.

    Example:
      >>> @pytest.mark.parametrize("schedule, donated", grid(["gpipe", "1f1b"], [False, True]))
    """
    kept = {tuple(n % len(axis) for axis in axes) for n in range(0, max(map(len, axes)), step)}
    numbered = (zip(*combination) for combination in itertools.product(*map(enumerate, axes)))
    return [values if numbers in kept else _slow(values) for numbers, values in map(tuple, numbered)]


def examples(count: int) -> settings:
    """Has hypothesis try so many examples in `make test-all`, and in `make test` a tenth of them."""
    everything = settings.get_current_profile_name() == "all"
    return settings(max_examples=count if everything else math.ceil(count / 10))


def _slow(values: tuple[Any, ...]) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
