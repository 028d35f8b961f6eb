"""What a run leaves in its folder at its end: pictures, a sample of text, measurements."""

from __future__ import annotations

import numpy as np

from mmnnx.inspect import draw_loss, draw_timeline
from mmnnx.train.average import averaged
from mmnnx.train.lockstep import is_first
from mmnnx.train.profile import measure
from mmnnx.train.progress import Display
from mmnnx.train.run import Run
from mmnnx.train.sample import sample


def draw_pictures(run: Run) -> None:
    """Writes loss.png and timeline.png, in the first process; every process must call it."""
    program = run.train_step.program(run.model, run.optimizer, run.data.held_out[0])
    if is_first():
        with run.folder.written():
            draw_loss(run.folder.rows()).savefig(run.folder.path / "loss.png")
            draw_timeline(program.simulate()).savefig(run.folder.path / "timeline.png")


def write_sample(run: Run, display: Display) -> None:
    """Shows text of the model, which goes on from the beginning of what is held out, and writes sample.txt.

    Every process must call it.
    """
    config, tokens = run.config, run.data.corpus.valid.tokens
    prompt = tokens[: max(1, config.sequence // 4)].astype(np.int32)
    with averaged(run.model, run.optimizer):
        made = sample(run.model, prompt, config.sample, config.sequence, seed=config.seed)
    text = run.data.codec.decode(made)
    display.say(f"--- a sample of its text:\n{text}\n---")
    if is_first():
        with run.folder.written():
            (run.folder.path / "sample.txt").write_text(text)


def write_profile(run: Run, display: Display) -> None:
    """Measures the parts of a step by taking one, and shows them; writes profile/ and timeline.png."""
    with run.folder.written():
        batch = run.data.held_out[0]
        display.say(str(measure(run.train_step, run.model, run.optimizer, batch, run.folder.path)))
