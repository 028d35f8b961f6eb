"""What a run leaves in its folder at its end: pictures, a sample of text, measurements."""

from __future__ import annotations

import numpy as np
from flax import nnx

from mmnnx.inspect import draw_loss, draw_timeline
from mmnnx.modules import LM
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.train.average import averaged
from mmnnx.train.config import TrainConfig
from mmnnx.train.inputs import Data
from mmnnx.train.lockstep import is_first
from mmnnx.train.profile import measure
from mmnnx.train.progress import Display
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.sample import sample


def draw_pictures(
    train_step: Jit, model: LM, optimizer: nnx.Optimizer, data: Data, folder: RunFolder
) -> None:
    """Writes loss.png and timeline.png, in the first process."""
    program = train_step.program(model, optimizer, data.held_out[0])
    if not is_first():
        return
    with folder.written():
        draw_loss(folder.rows()).savefig(folder.path / "loss.png")
        draw_timeline(program.simulate()).savefig(folder.path / "timeline.png")


def write_sample(
    config: TrainConfig, model: LM, optimizer: nnx.Optimizer, data: Data, folder: RunFolder, display: Display
) -> None:
    """Shows text from the model, which goes on from the beginning of the held-out text; writes sample.txt."""
    prompt = data.corpus.valid.tokens[: max(1, config.sequence // 4)].astype(np.int32)
    with averaged(model, optimizer):
        tokens = sample(model, prompt, config.sample, config.sequence, seed=config.seed)
    text = data.codec.decode(tokens)
    display.say(f"--- a sample of its text:\n{text}\n---")
    if is_first():
        with folder.written():
            (folder.path / "sample.txt").write_text(text)


def write_profile(
    train_step: Jit, model: LM, optimizer: nnx.Optimizer, data: Data, folder: RunFolder, display: Display
) -> None:
    """Measures the parts of a step, by taking one; shows and writes them."""
    with folder.written():
        display.say(str(measure(train_step, model, optimizer, data.held_out[0], folder.path / "profile")))
