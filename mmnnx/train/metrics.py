"""The losses of a run: fetched, checked, recorded and shown."""

from __future__ import annotations

import math
import time
from collections import deque

import jax

import mmnnx as mm
from mmnnx.train.errors import Diverged
from mmnnx.train.progress import Display
from mmnnx.train.run_folder import RunFolder


class Meter:
    """Records and shows the losses.

    Each is fetched after the next step is dispatched, so that the devices never wait for the host. Speeds
    are means over ten steps, fewer after a validation. Raises Diverged at the first loss that is not finite,
    in every process that has one. ``folder`` is None if another process writes, ``tokens`` are in a step.
    """

    def __init__(self, folder: RunFolder | None, display: Display, tokens: int, bytes_per_token: float = 1.0):
        self._folder, self._display, self._tokens = folder, display, tokens
        self._bytes_per_token = bytes_per_token
        self._pending: tuple[int, jax.Array] | None = None
        self._times: deque[float] = deque([time.perf_counter()], maxlen=11)

    def step(self, step: int, loss: jax.Array) -> None:
        """``step`` is dispatched, and ``loss`` will be its loss."""
        self.flush()
        self._pending = step, loss

    def flush(self) -> None:
        """Wait for the last loss and record it."""
        if self._pending is None:
            return
        step, loss = self._pending[0], float(mm.fetch(self._pending[1]))
        self._pending = None
        if not math.isfinite(loss):
            raise Diverged(step, "the loss", loss)
        self._times.append(time.perf_counter())
        speed = self._tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0])
        if self._folder:
            self._folder.add(step=step, loss=loss, tokens_per_second=round(speed, 1))
        self._display.step(step, loss, speed)

    def validation(self, step: int, loss: float) -> float:
        """Record the validation loss after ``step``, in nats per token; returns it in bits per byte."""
        if not math.isfinite(loss):
            raise Diverged(step, "the validation loss", loss)
        bits = loss / math.log(2) / self._bytes_per_token
        if self._folder:
            self._folder.add(step=step, val_loss=loss, val_bits_per_byte=bits)
        tokens = "" if self._bytes_per_token == 1 else f"perplexity {math.exp(min(loss, 700)):,.2f}, "
        self._display.say(f"step {step}: validation loss {loss:.4f}, {tokens}{bits:.3f} bits per byte")
        self._times = deque([time.perf_counter()], maxlen=11)
        return bits
