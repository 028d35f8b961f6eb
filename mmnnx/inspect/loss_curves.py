"""Loss curves, with what explains them: learning rate and throughput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmnnx.inspect.figure_style import WIDTH, settle_ticks, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING, SMOOTHED, VALIDATION, BELOW = "#9db4d3", "#3572b0", "#de5837", "#2f8f83"


def draw_loss(rows: Iterable[Mapping[str, float]], *, dark: bool = False) -> Figure:
    """Training and validation loss over the steps, both in nats per token; below, learning rate and tokens/s.

    The training loss is drawn of each step, and smoothed: see `smooth`.

    Args:
      rows: those of metrics.jsonl, with ``step``, and ``loss`` or ``val_loss`` (nats per token);
        ``learning_rate`` and ``tokens_per_second`` have panels of their own if there are any.
      dark: draws for dark paper.

    >>> draw_loss([{"step": 1, "loss": 5.5}, {"step": 1, "val_loss": 5.6}]).savefig("loss.png")
    """
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    rows = list(rows)

    def series(key: str) -> list[list[float]]:
        return [[row[name] for row in rows if key in row] for name in ("step", key)]

    names = {"learning_rate": "learning rate", "tokens_per_second": "tokens/s"}
    below = [key for key in names if any(key in row for row in rows)]
    with styled(dark) as look:
        figure = Figure(figsize=(WIDTH, 3.0 + 0.9 * len(below)), layout="constrained")
        panels = figure.subplots(1 + len(below), height_ratios=[3.2] + [1] * len(below), squeeze=False)[:, 0]
        losses, *others = panels
        steps, values = series("loss")
        # One point is no line.
        dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(steps) == 1 else {}
        each, smoothed = "training, each step", "training, smoothed"
        losses.plot(steps, values, color=TRAINING, linewidth=0.7, alpha=0.6, label=each, **dot)
        losses.plot(steps, smooth(values), color=SMOOTHED, linewidth=1.5, label=smoothed, **dot)
        steps, values = series("val_loss")
        if values:
            losses.plot(
                steps,
                values,
                "o:",
                color=VALIDATION,
                markersize=4,
                linewidth=1,
                label="validation",
                clip_on=False,
                zorder=3,
            )
            losses.annotate(
                f"{values[-1]:.3f}",
                (steps[-1], values[-1]),
                textcoords="offset points",
                xytext=(5, 0),
                va="center",
            )
        losses.set(ylabel="loss (nats per token)")
        losses.legend(loc="upper right")
        for axes, key in zip(others, below, strict=True):
            axes.plot(*series(key), color=BELOW, linewidth=1.2, **dot)
            axes.set(ylabel=names[key])
            axes.set_ylim(bottom=0)
        for axes in panels:
            axes.grid(linewidth=0.5)
            axes.set_axisbelow(True)
            axes.set_xlim(0, max((row["step"] for row in rows), default=0) * 1.07 or 1)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            settle_ticks(axes, look)
            axes.tick_params(labelbottom=axes is panels[-1])
        panels[-1].set_xlabel("step")
        return figure


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a fortieth of all on each side; at the ends, of fewer.

    It lags behind nothing: there are as many before a value as after it.

    >>> smooth([4.0, 1.0, 1.0])
    [4.0, 2.0, 1.0]
    """
    count, reach = len(values), max(1, len(values) // 40)
    near = (min(n, count - 1 - n, reach) for n in range(count))
    return [sum(values[n - k : n + k + 1]) / (2 * k + 1) for n, k in enumerate(near)]
