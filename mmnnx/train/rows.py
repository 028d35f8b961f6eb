"""Text as rows of tokens: a stream that is cut into sequences, or whole documents packed side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any, Literal, Protocol

import numpy as np

from mmnnx.train.data import Text

Packing = Literal["auto", "documents", "stream"]
Row = dict[str, Any]  # the arguments of `LM.loss`, [length] each; [batch, length] in a batch


class Rows(Protocol):
    """Rows of tokens, of the same length each.

    Attributes:
      length: of a row, in tokens.
      used: which part of all their tokens are of text, and not padding: at most 1.
    """

    length: int
    used: float

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> Row:
        """Row number `index`; its weights are 1, and 0 for padding and for labels that are not in the loss.

        Each row has a label that is.
        """


def rows_of(text: Text, length: int, packing: Packing) -> Rows:
    """The rows of a text; "auto" packs the documents of records, and makes a stream of text files."""
    if packing == "documents" or (packing == "auto" and text.records):
        return Packed(text, length)
    return Stream(text, length)


class Stream:
    """Documents joined, in consecutive sequences: a token sees the documents before its own, too.

    Example:
      >>> text = Text(np.array([5, 6, 7, 9, 8]), np.array([3, 5]), 5)
      >>> {name: values.tolist() for name, values in Stream(text, 2)[0].items()}
      {'tokens': [5, 6], 'labels': [6, 7], 'weights': [1.0, 1.0]}
    """

    used = 1.0

    def __init__(self, text: Text, length: int):
        self.text, self.length = text, length
        starts = np.arange(0, len(text) - length, length)
        self._starts = starts[text.count(starts + 1, np.full_like(starts, length)) > 0]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = self._starts[index]
        tokens = self.text.tokens[start : start + self.length + 1].astype(np.int32)
        weights = self.text.weights(start + 1, self.length)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "weights": weights}


class Packed:
    """Whole documents side by side, each with segment number and positions of its own; the rest is padding.

    Every token but the first of its document is a label once. The last token of a document is label alone, so
    that one of `n + 1` tokens fills `n` places. A longer one is cut into pieces, which do not see each other;
    a piece with no label in the loss is left out.

    Example:
      >>> text = Text(np.array([5, 6, 7, 9, 8]), np.array([3, 5]), 5)
      >>> {name: values.tolist() for name, values in Packed(text, 5)[0].items()}
      {'tokens': [5, 6, 9, 0, 0], 'labels': [6, 7, 8, 0, 0], 'weights': [1.0, 1.0, 1.0, 0.0, 0.0],
       'positions': [0, 1, 0, 0, 0], 'segment_ids': [1, 1, 2, 0, 0]}
    """

    def __init__(self, text: Text, length: int):
        self.text, self.length = text, length
        firsts = np.concatenate([[0], text.ends[:-1]])
        sizes = np.maximum(text.ends - firsts - 1, 0)
        counts = -(-sizes // length)  # pieces of each document
        document = np.repeat(np.arange(len(counts)), counts)
        offset = length * (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts))
        starts, lengths = firsts[document] + offset, np.minimum(length, sizes[document] - offset)
        kept = text.count(starts + 1, lengths) > 0
        self._starts, self._sizes = starts[kept], lengths[kept]
        row = best_fit(self._sizes, length)
        self._pieces = np.argsort(row, kind="stable")
        self._ends = np.cumsum(np.bincount(row))
        self.used = float(self._sizes.sum() / max(1, len(self) * length))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Row:
        row = {
            name: np.zeros(self.length, np.float32 if name == "weights" else np.int32)
            for name in ("tokens", "labels", "weights", "positions", "segment_ids")
        }
        pieces = self._pieces[self._ends[index - 1] if index else 0 : self._ends[index]]
        at = 0
        for segment, (start, size) in enumerate(zip(self._starts[pieces], self._sizes[pieces]), 1):
            here = slice(at, at + size)
            row["tokens"][here] = self.text.tokens[start : start + size]
            row["labels"][here] = self.text.tokens[start + 1 : start + size + 1]
            row["weights"][here] = self.text.weights(start + 1, size)
            row["positions"][here] = np.arange(size)
            row["segment_ids"][here] = segment
            at += size
        return row


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Which row each piece goes in, int64 [pieces]: the largest first, each where it leaves least space.

    Args:
      sizes: of the pieces, int [pieces], from 1 to `length`.
      length: of a row.

    >>> best_fit(np.array([3, 1, 4, 2]), 5).tolist()
    [1, 0, 0, 1]
    """
    found = np.empty(len(sizes), np.int64)
    with_space: dict[int, list[int]] = defaultdict(list)  # rows, by how much space there is in them
    spaces: list[int] = []  # those sizes of space, in order
    count = 0
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        at = bisect_left(spaces, size)
        if at == len(spaces):
            space, row = length, count
            count += 1
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[at]
        found[piece] = row
        if left := space - size:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(row)
    return found
