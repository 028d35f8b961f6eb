"""The losses of a run: fetched, checked, recorded and shown."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping

import jax
import numpy as np

import mmnnx as mm
from mmnnx.train.assistant import LossOn
from mmnnx.train.errors import Diverged
from mmnnx.train.progress import Display
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.trackers import Trackers


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
      tokens: in a step, without padding; where documents are packed, on average.
      flops: operations that the model needs for a token, without recomputation.
      devices: how many it runs on.
      peak: operations a second that one of them can do; None where that is not published, as of a CPU.
      bytes_per_token: of the held-out text that is in the loss.
      loss_on: which tokens are.
      learning_rate: of each step, float [steps].
    """

    tokens: float
    flops: float
    devices: int
    peak: float | None
    bytes_per_token: float
    loss_on: LossOn
    learning_rate: np.ndarray

    def speeds(self, steps: int, seconds: float) -> dict[str, float]:
        """Tokens a second, and those and operations of one device; how much of its peak that is (MFU)."""
        tokens = self.tokens * steps / seconds
        found = {
            "tokens_per_second": round(tokens, 1),
            "tokens_per_second_per_device": round(tokens / self.devices, 1),
            "flops_per_second_per_device": round(tokens * self.flops / self.devices),
        }
        if self.peak is not None:
            found["mfu"] = round(found["flops_per_second_per_device"] / self.peak, 4)
        return found


class Meter:
    """Records and shows the losses.

    Each is fetched after the next step is dispatched, so that the devices never wait for the host. Speeds
    are means over ten steps, fewer after a validation and after the first step, which compiles. Raises
    Diverged at the first loss that is not finite, in every process that has one. ``folder`` is None if
    another process writes.
    """

    def __init__(self, folder: RunFolder | None, trackers: Trackers, display: Display, work: Work):
        self._folder, self._trackers, self._display, self._work = folder, trackers, display, work
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._times: deque[float] = deque([time.perf_counter()], maxlen=11)
        self._compiled = False

    def step(self, step: int, values: dict[str, jax.Array]) -> None:
        """``step`` is dispatched, and ``values`` will be its loss and the norm of its gradients."""
        self.flush()
        self._pending = step, values

    def flush(self) -> None:
        """Wait for the last loss and record it."""
        if self._pending is None:
            return
        step, values = self._pending[0], {k: float(v) for k, v in mm.fetch(self._pending[1]).items()}
        self._pending = None
        if not math.isfinite(loss := values["loss"]):
            raise Diverged(step, "the loss", loss)
        self._times.append(time.perf_counter())
        speeds = self._work.speeds(len(self._times) - 1, self._times[-1] - self._times[0])
        rate = float(self._work.learning_rate[step - 1])
        seconds = round(self._times[-1] - self._times[-2], 6)
        self._record(step=step, **values, learning_rate=rate, seconds=seconds, **speeds)
        self._display.step(step, loss, speeds["tokens_per_second"])
        if not self._compiled:  # the time of the first step says nothing about later ones
            self._compiled, self._times = True, deque([self._times[-1]], maxlen=11)

    def validation(self, step: int, loss: float, memory: Mapping[str, int] | None = None) -> float:
        """Record the validation loss after ``step``, in nats per token, and the memory until then.

        Returns the loss in bits per byte.
        """
        if not math.isfinite(loss):
            raise Diverged(step, "the validation loss", loss)
        bits = loss / math.log(2) / self._work.bytes_per_token
        self._record(step=step, val_loss=loss, val_bits_per_byte=bits, **(memory or {}))
        tokens = "" if self._work.bytes_per_token == 1 else f"perplexity {math.exp(min(loss, 700)):,.2f}, "
        of = " of the assistant's tokens" if self._work.loss_on == "assistant" else ""
        self._display.say(f"step {step}: validation loss{of} {loss:.4f}, {tokens}{bits:.3f} bits per byte")
        self._times = deque([time.perf_counter()], maxlen=11)
        return bits

    def _record(self, **row: float) -> None:
        if self._folder:
            self._folder.add(**row)
        self._trackers.add(row)
