"""A run from its first step to its last."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx

from mmnnx.inspect import draw_loss, draw_timeline
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.config import TrainConfig
from mmnnx.train.data import load_corpus, train_batches, valid_batches
from mmnnx.train.devices import choose_devices
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.folder import RunFolder
from mmnnx.train.progress import Display
from mmnnx.train.sample import sample
from mmnnx.train.step import create, make_eval_step, make_train_step, place


def train(config: TrainConfig) -> RunFolder:
    """Train the model that ``config`` describes; returns the folder that holds the run.

    Raises UserError before anything runs if the config cannot be carried out, Diverged if a loss is not
    finite, and Interrupted after a Ctrl-C, once the run is saved.

    >>> train(TrainConfig(out=Path("run"), stages=1, tensor=1, steps=10)).rows()[-1]
    {'step': 10, 'val_bits_per_byte': 4.9}
    """
    config.validate()
    corpus = load_corpus(config.data)
    batches = train_batches(corpus, config.batch, config.sequence, config.seed)
    held_out = valid_batches(corpus, config.batch, config.sequence)
    mesh, placement = place(config, choose_devices(config.stages * config.tensor))
    folder = RunFolder.open(config.folder())[0] if config.resume else RunFolder.create(config)

    with mesh, contextlib.closing(Checkpoints(folder.checkpoints)) as checkpoints:
        start = checkpoints.latest or 0
        if start >= config.steps:
            raise UserError(f"the run in {folder.path} has taken {start} steps; to go on give more --steps")
        model, optimizer = create(config, placement)
        nodes = {"model": model, "optimizer": optimizer}
        if start:
            extra = checkpoints.restore(start, nodes)
            if extra["text"] != corpus.checksum:
                raise UserError(
                    f"the text of the run in {folder.path} has changed since; start another with --name"
                )
            batches.set_state(extra["batches"])
        folder.begin(config, start)
        train_step, validate = make_train_step(config), make_validate(held_out)

        with Display(config.steps, start) as display, ctrl_c() as stop, telling_last(checkpoints):
            size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
            platform = mesh.devices.flat[0].platform
            display.say(
                f"{size:,} parameters on {config.stages} x {config.tensor} {platform} devices, "
                f"{len(corpus.train) + len(corpus.valid):,} bytes of text in {corpus.files:,} files, "
                f"run in {folder.path}"
            )
            meter = Meter(folder, display, tokens=config.batch * config.sequence)
            if not start:
                meter.validation(0, validate(model))
            for step in range(start + 1, config.steps + 1):
                meter.step(step, train_step(model, optimizer, next(batches)))
                if stop or step % config.eval_every == 0 or step == config.steps:
                    meter.flush()
                    bits = validate(model)
                    meter.validation(step, bits)
                    extra = {"batches": batches.get_state(), "text": corpus.checksum}
                    checkpoints.save(step, nodes, extra, val_bits_per_byte=bits)
                if stop and step < config.steps:
                    raise Interrupted(step)

        draw_loss(folder.rows()).savefig(folder.path / "loss.png")
        timeline = train_step.program(model, optimizer, held_out[0]).simulate()
        draw_timeline(timeline).savefig(folder.path / "timeline.png")
        if config.sample:
            prompt = held_out[0, 0, : config.sequence // 4].astype(np.uint8).tobytes()
            text = sample(model, prompt, config.sample, config.sequence, seed=config.seed)
            (folder.path / "sample.txt").write_bytes(text)
            display.say(f"--- a sample of its text:\n{text.decode(errors='replace')}\n---")
    return folder


@contextlib.contextmanager
def telling_last(checkpoints: Checkpoints) -> Iterator[None]:
    """A run that diverges says what it leaves."""
    try:
        yield
    except Diverged as error:
        error.saved = checkpoints.latest
        raise


class Meter:
    """Writes down and shows the losses.

    Each is fetched after the next step is dispatched, so that the devices never wait for the host. Speeds
    are means over ten steps, fewer after a validation. Raises Diverged at the first loss that is not finite.
    """

    def __init__(self, folder: RunFolder, display: Display, tokens: int):
        self._folder, self._display, self._tokens = folder, display, tokens
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
        step, loss = self._pending[0], float(self._pending[1])
        self._pending = None
        if not math.isfinite(loss):
            raise Diverged(step, "the loss", loss)
        self._times.append(time.perf_counter())
        speed = self._tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0])
        self._folder.add(step=step, loss=loss, tokens_per_second=round(speed, 1))
        self._display.step(step, loss, speed)

    def validation(self, step: int, bits: float) -> None:
        """Record the validation loss after ``step``."""
        if not math.isfinite(bits):
            raise Diverged(step, "the validation loss", bits)
        self._folder.add(step=step, val_bits_per_byte=bits)
        self._display.say(f"step {step}: validation {bits:.3f} bits per byte")
        self._times = deque([time.perf_counter()], maxlen=11)


def make_validate(held_out: np.ndarray) -> Callable[[nnx.Module], float]:
    """``validate(model)``: mean loss in bits a byte over batches ``held_out`` [count, batch, length + 1]."""
    eval_step = make_eval_step()

    def validate(model: nnx.Module) -> float:
        losses = [eval_step(model, batch) for batch in held_out]
        return float(np.mean([float(loss) for loss in losses])) / math.log(2)

    return validate


@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed; pressed again, it interrupts as it always does."""
    pressed: list[int] = []

    def press(number, frame):
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
