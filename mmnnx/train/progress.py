"""The progress of a run: a live bar on a terminal, plain lines anywhere else; nothing with --quiet."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mmnnx.output import current
from mmnnx.printable import printable


class Display:
    """Shows the steps of a run from ``start`` to ``steps``, or nothing if ``quiet``; a context manager.

    Example:
      >>> with Display(steps=100) as display:
      ...     display.step(1, loss=5.5, tokens_per_second=1000.0)
      step 1/100  loss 5.5000  1,000 tokens/s  ? left
    """

    def __init__(self, steps: int, start: int = 0, quiet: bool = False):
        self.console = Console(highlight=False, emoji=False, quiet=quiet or current.get().quiet)
        self._steps, self._start = steps, start
        self._every = max(1, steps // 20)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> Display:
        self._began = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that a step is done; ``loss`` in nats per token."""
        if step == self._start + 1:  # it included compilation, so its time says nothing about later steps
            self._began = time.monotonic()
            left = "?"
        else:
            took = (time.monotonic() - self._began) / (step - self._start - 1)
            left = _clock(took * (self._steps - step))
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {left} left"
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and (
            step % self._every == 0 or step in (self._start + 1, self._steps)
        ):
            self.say(f"step {step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(printable(text, keep="\n\t"), markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
