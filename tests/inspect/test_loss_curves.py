"""Loss curves, looked at through what matplotlib was told to draw."""

from __future__ import annotations

import pytest

from mmnnx.inspect import draw_loss


def test_losses_are_drawn_in_nats():
    rows = [{"step": 0, "val_loss": 8.0, "val_bits_per_byte": 11.5}]
    rows += [{"step": i, "loss": 8.0 - i, "tokens_per_second": 1.0} for i in range(1, 4)]
    rows += [{"step": 3, "val_loss": 5.5}]
    train, valid = draw_loss(rows).axes[0].lines
    assert train.get_ydata() == pytest.approx([7, 6, 5])
    assert list(valid.get_xdata()) == [0, 3] and list(valid.get_ydata()) == [8.0, 5.5]
