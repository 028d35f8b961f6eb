"""Loss curves, looked at through what matplotlib was told to draw."""

from __future__ import annotations

import pytest

from mmnnx.inspect import draw_loss
from mmnnx.inspect.loss_curves import smooth


def test_losses_are_drawn_in_nats():
    rows = [{"step": 0, "val_loss": 8.0, "val_bits_per_byte": 11.5}]
    rows += [{"step": i, "loss": 8.0 - i, "tokens_per_second": 1.0} for i in range(1, 4)]
    rows += [{"step": 3, "val_loss": 5.5}]
    losses, speeds = draw_loss(rows).axes
    train, smoothed, valid = losses.lines
    assert train.get_ydata() == pytest.approx([7, 6, 5]) and smoothed.get_ydata() == pytest.approx([7, 6, 5])
    assert list(valid.get_xdata()) == [0, 3] and list(valid.get_ydata()) == [8.0, 5.5]
    assert losses.get_ylabel() == "loss (nats per token)" and losses.get_xlim()[0] == 0
    assert speeds.get_ylabel() == "tokens/s" and list(speeds.lines[0].get_ydata()) == [1, 1, 1]


def test_smoothing_lags_behind_nothing():
    assert smooth([4.0, 1.0, 1.0, 7.0]) == [4.0, 2.0, 3.0, 7.0]
    line = [float(n) for n in range(400)]
    assert smooth(line) == pytest.approx(line)
    assert smooth([]) == []
