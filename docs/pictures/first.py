"""Makes the picture of the first page: `python docs/pictures/first.py [FILE]`, on any machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import matplotlib.image  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import mmnnx as mm  # noqa: E402
from mmnnx.modules import LM, LMConfig  # noqa: E402

FILE = Path(__file__).parent / "first.png"


def main(file: Path) -> None:
    """A small language model on four stages of two devices: a step under 1F1B, over what each stage holds."""
    make = lambda: LM(LMConfig(layers=8), rngs=nnx.Rngs(0))
    mesh = mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))
    placement = mm.pipeline_sharding(nnx.eval_shape(make), stages=4, rules=mm.logical_rules("tensor"))
    with mesh:
        model = mm.jit(make, out_shardings=placement)()
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))(model)

        @mm.jit
        def train_step(model, optimizer, tokens):
            grad_fn = nnx.value_and_grad(lambda model, tokens: model.loss(tokens))
            in_parts = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, schedule="1f1b", reduce="mean")
            loss, grads = in_parts(model, tokens)
            optimizer.update(model, grads)
            return loss

        program = train_step.program(model, optimizer, np.zeros((16, 65), np.int32))
        views = [mm.timeline(program), mm.show_placement(model, optimizer)]
    pictures = [picture_of(view) for view in views]
    width = max(picture.shape[1] for picture in pictures)
    margins = [divmod(width - picture.shape[1], 2) for picture in pictures]
    wide = [
        np.pad(picture, ((0, 0), (left, left + odd), (0, 0)), constant_values=1)
        for picture, (left, odd) in zip(pictures, margins)
    ]
    file.parent.mkdir(exist_ok=True)
    matplotlib.image.imsave(file, np.concatenate(wide))


def picture_of(view: mm.TimelineView | mm.PlacementView) -> np.ndarray:
    """[height, width, 3], from 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        view.save(file := Path(folder) / "picture.png")
        return matplotlib.image.imread(file)[:, :, :3]


main(Path(sys.argv[1]) if sys.argv[1:] else FILE)
