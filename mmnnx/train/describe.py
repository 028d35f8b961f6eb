"""What a run says of itself at its start, and the work of its steps."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import mmnnx as mm
from mmnnx.plan.chips import chip_of
from mmnnx.plan.language_models import flops_of_token
from mmnnx.train.metrics import Work
from mmnnx.train.optimizers import learning_rate
from mmnnx.train.rows import Packed
from mmnnx.train.run import Run
from mmnnx.train.step import model_config


def work(run: Run) -> Work:
    """What a step does, for its metrics."""
    config, data, mesh = run.config, run.data, run.mesh
    chip = chip_of(mesh.devices.flat[0])
    return Work(
        tokens=config.batch * config.sequence * data.rows.used,
        flops=flops_of_token(model_config(config), config.sequence, config.lora),
        devices=config.devices,
        peak=None if chip is None else chip.flops[config.precision],
        bytes_per_token=data.corpus.bytes_per_token,
        loss_on=config.loss_on,
        learning_rate=np.asarray(learning_rate(config)(np.arange(config.steps))),
    )


def describe(run: Run) -> str:
    """What is trained, on what, and where it is kept."""
    config, corpus, rows = run.config, run.data.corpus, run.data.rows
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(run.model, nnx.Param)))
    shown = [n for axis, n in config.mesh_axes.items() if n > 1 or axis in ("stage", "model")]
    lines = [
        f"{size:,} parameters on {' x '.join(map(str, shown))} {describe_devices(run.mesh)}, "
        f"{len(corpus.train) + len(corpus.valid):,} {corpus.unit}s of text in {corpus.documents:,} "
        f"{'document' if corpus.documents == 1 else 'documents'}, run in {run.folder.path}"
    ]
    if isinstance(rows, Packed):
        lines.append(
            f"documents are packed in {len(rows):,} rows of {config.sequence} {corpus.unit}s, which they "
            f"fill to {rows.used:.1%}"
        )
    if config.loss_on == "assistant":
        share = corpus.train.counted / len(corpus.train)
        lines.append(f"the loss is on the assistant's {corpus.unit}s alone, {share:.1%} of those to train on")
    return "\n".join(lines)


def describe_devices(mesh: mm.MultiMesh) -> str:
    """Such as "cpu devices of 4 processes"; a single process is not mentioned."""
    processes = len({device.process_index for device in mesh.devices.flat})
    of = f" of {processes} processes" if processes > 1 else ""
    return f"{mesh.devices.flat[0].platform} devices{of}"
