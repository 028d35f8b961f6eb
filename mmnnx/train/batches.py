"""Batches of rows: in which order they are trained on, and which ones validate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from mmnnx.train.errors import UserError
from mmnnx.train.rows import Row, Rows

# A batch is made in much less time than a step takes; grain would keep 500, and have 16 threads for files.
AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)


def train_batches(rows: Rows, batch: int, seed: int) -> grain.DatasetIterator:
    """Endless batches of rows, [batch, length] each: the arguments of `LM.loss`; shuffled anew in each epoch.

    The weights of a batch sum to one, so that the loss is the mean over its labels however it is divided.
    The iterator's ``get_state()`` and ``set_state()`` get and set its position.
    Raises UserError when there are fewer rows than a batch has.
    """
    if len(rows) < batch:
        raise UserError(
            f"--data has {len(rows)} sequences of {rows.length} to train on, less than one batch of {batch}; "
            "give more text, or a smaller --batch or --sequence"
        )
    shuffled = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
    batches = shuffled.batch(batch, drop_remainder=True).map(_with_mean)
    return iter(batches.to_iter_dataset(AHEAD))


def _with_mean(batch: Row) -> Row:
    return batch | {"weights": batch["weights"] / batch["weights"].sum()}


def valid_batches(rows: Rows, batch: int, count: int = 4) -> list[Row]:
    """At most ``count`` batches of rows, [batch, length] each, always the same, spread over them.

    Raises UserError when there is no row.
    """
    if not len(rows):
        raise UserError(
            f"--data has less than one sequence of {rows.length} held out for validation; give more text, or "
            "a smaller --sequence"
        )
    chosen = np.unique(np.linspace(0, len(rows) - 1, count * batch).astype(int))
    return list(in_batches(rows, chosen, batch))


def in_batches(rows: Rows, numbers: Sequence[int] | np.ndarray, batch: int) -> Iterator[Row]:
    """Those rows in batches, [batch, length] each; the last is filled up with rows of no weight."""
    for start in range(0, len(numbers), batch):
        some = [rows[n] for n in numbers[start : start + batch]]
        filler = some[0] | {"weights": np.zeros_like(some[0]["weights"])}
        some += [filler] * (batch - len(some))
        yield {name: np.stack([row[name] for row in some]) for name in filler}
