"""Loss curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_loss(rows: Iterable[Mapping[str, float]]) -> Figure:
    """Training and validation loss, in bits per byte, over the steps.

    ``rows`` are those of metrics.jsonl: with ``step``, and ``loss`` (nats per byte) or ``val_bits_per_byte``.

    >>> draw_loss([{"step": 1, "loss": 5.5}, {"step": 1, "val_bits_per_byte": 7.9}]).savefig("loss.png")
    """
    from matplotlib.figure import Figure  # slow to import

    rows = list(rows)
    train = [(row["step"], row["loss"] / math.log(2)) for row in rows if "loss" in row]
    valid = [(row["step"], row["val_bits_per_byte"]) for row in rows if "val_bits_per_byte" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte")
    axes.plot(*zip(*train, strict=True), color="#9db4d3", linewidth=1.2, label="training")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="#c8553d", markersize=4, label="validation")
        axes.annotate(
            f"{valid[-1][1]:.2f}", valid[-1], textcoords="offset points", xytext=(0, 8), ha="center"
        )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
