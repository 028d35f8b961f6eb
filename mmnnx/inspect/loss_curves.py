"""Loss curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_loss(rows: Iterable[Mapping[str, float]]) -> Figure:
    """Training and validation loss, in nats per token, over the steps.

    ``rows`` are those of metrics.jsonl: with ``step``, and ``loss`` or ``val_loss`` (nats per token).

    >>> draw_loss([{"step": 1, "loss": 5.5}, {"step": 1, "val_loss": 5.6}]).savefig("loss.png")
    """
    from matplotlib.figure import Figure  # slow to import

    rows = list(rows)
    train, valid = ([(row["step"], row[key]) for row in rows if key in row] for key in ("loss", "val_loss"))
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.plot(*zip(*train, strict=True), color="#9db4d3", linewidth=1.2, label="training")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="#c8553d", markersize=4, label="validation")
        axes.annotate(
            f"{valid[-1][1]:.2f}", valid[-1], textcoords="offset points", xytext=(0, 8), ha="center"
        )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
