"""Picking many entries of a list or a dict at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


def picker(places: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """`operator.itemgetter` that returns a tuple for any number of places or keys.

    Example:
      >>> picker([2])("abc")
      ('c',)
    """
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda entries: (entries[places[0]],)) if places else (lambda entries: ())
