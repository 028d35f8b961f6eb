"""Picking many entries of a list at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """`operator.itemgetter` that returns a sequence for any number of places.

    Example:
      >>> picker([2])("abc")
      ('c',)
    """
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda entries: (entries[places[0]],)) if places else (lambda entries: ())
