"""The order of fragments while they are formed: which come after which, as bit sets."""

from __future__ import annotations

from collections.abc import Iterable


class FragmentOrder:
    """A partial order of fragments, numbered as they are added."""

    def __init__(self) -> None:
        self._after: list[int] = []  # for each fragment, those that come after it

    def add(self) -> int:
        """Adds a fragment; its number."""
        self._after.append(0)
        return len(self._after) - 1

    def beyond(self, fragments: int) -> int:
        """What comes after any of a set of fragments."""
        found = 0
        for f in _bits(fragments):
            found |= self._after[f]
        return found

    def come_after(self, later: int, f: int) -> None:
        """Has a set of fragments come after f, and so after all that f comes after."""
        later |= self.beyond(later)
        if not later & ~self._after[f]:
            return
        self._after[f] |= later
        for g in range(len(self._after)):
            if self._after[g] >> f & 1:
                self._after[g] |= later

    def in_order(self) -> list[int]:
        """All fragments, each before those that come after it, otherwise the last added first."""
        left, order = set(range(len(self._after))), []
        while left:
            waiting = 0
            for f in left:
                waiting |= self._after[f]
            f = max(f for f in left if not waiting >> f & 1)
            left.remove(f)
            order.append(f)
        return order


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
