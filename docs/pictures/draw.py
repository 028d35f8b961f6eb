"""Draws all pictures of this folder, each for light and for dark paper.

python docs/pictures/draw.py                  # trains the small language model first: some minutes
python docs/pictures/draw.py --run runs/NAME  # takes the losses of a run that is there
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402 - devices come before imports that use them
import tyro  # noqa: E402
from flax import nnx  # noqa: E402

import mmnnx as mm  # noqa: E402
from mmnnx.inspect import TimelineView, draw_loss, draw_mesh  # noqa: E402
from mmnnx.inspect.schedules import by_name  # noqa: E402
from mmnnx.modules import LM, LMConfig  # noqa: E402
from mmnnx.mpmd.ir.timeline import UNIT_COSTS  # noqa: E402
from mmnnx.train import TrainConfig, train  # noqa: E402
from mmnnx.train.run_folder import RunFolder  # noqa: E402

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from contenders.report import draw as draw_benchmark  # noqa: E402


def step(tensor: int) -> tuple[mm.MultiMesh, tuple[Any, ...], Any]:
    """A language model in four stages of `tensor` devices: its mesh, the arguments of its step, the step."""
    devices = jax.devices()[: 4 * tensor]
    mesh = mm.MultiMesh(axis_sizes=(4, tensor), axis_names=("stage", "model"), devices=devices)
    config = LMConfig(vocab=512, layers=8, width=128, heads=4, kv_heads=2, mlp=384)

    def make() -> LM:
        return LM(config, rngs=nnx.Rngs(0))

    def train_step(model, optimizer, tokens):
        grad_fn = nnx.value_and_grad(lambda model, tokens: model.loss(tokens))
        run = mm.microbatch(grad_fn, dim=0, size=4, argnum=1, schedule="1f1b", reduce="mean")
        loss, grads = run(model, tokens)
        optimizer.update(model, grads)
        return loss

    with mesh:
        rules = mm.logical_rules("tensor")
        placement = mm.pipeline_sharding(nnx.eval_shape(make), stages=4, rules=rules)
        model = mm.jit(make, out_shardings=placement)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adamw(1e-3), wrt=nnx.Param))(model)
        tokens = jax.random.randint(jax.random.key(0), (32, 129), 0, 512)
    return mesh, (model, optimizer, tokens), mm.jit(train_step)


def main(run: Path | None = None) -> None:
    """Draw the pictures of the documents.

    Args:
      run: folder of a run of `make train`, whose losses are drawn; without one, there is one first.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rows = (train(TrainConfig(out=Path(scratch) / "run")) if run is None else RunFolder(run)).rows()
    summary = json.loads((BENCHMARKS / "results" / "side_by_side.json").read_text())
    zero_bubble = by_name("zero-bubble-h1", 4, 8, 2, UNIT_COSTS).timeline
    single, its_arguments, its_step = step(1)  # of CPUs, devices of one mesh take turns
    with single:
        measured = its_step.program(*its_arguments)
        profile = measured.profile(*its_arguments)
    mesh, arguments, train_step = step(2)
    with mesh:
        program, plan = train_step.program(*arguments), mm.plan(train_step, *arguments)
        for dark, end in ((False, ""), (True, "-dark")):
            views = {
                "timeline": mm.timeline(program, dark=dark),
                "measured": mm.timeline(measured, profile, dark=dark),
                "zero-bubble-h1": TimelineView(zero_bubble, dark=dark),
                "placement": mm.show_placement(*arguments[:2], plan=plan, memory=32e6, dark=dark),
            }
            for name, view in views.items():
                view.save(FOLDER / f"{name}{end}.png")
            draw_mesh(mesh, dark=dark).savefig(FOLDER / f"mesh{end}.png")
            draw_loss(rows, dark=dark).savefig(FOLDER / f"loss{end}.png")
            draw_benchmark(summary, dark=dark).savefig(FOLDER / f"benchmark{end}.png")


if __name__ == "__main__":
    tyro.cli(main)
