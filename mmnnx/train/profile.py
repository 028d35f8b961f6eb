"""What ``--profile`` leaves in the folder of a run: a trace of some steps, and a step that is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.ir.timeline import Profile
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.train.rows import Row


@contextlib.contextmanager
def traced(folder: Path, optimizer: nnx.Optimizer) -> Iterator[None]:
    """Inside, `jax.profiler` writes a trace, for TensorBoard and XProf; of several processes each its own.

    At the end it waits for the last step, of which the optimizer's state is a result.
    """
    several = jax.process_count() > 1
    with jax.profiler.trace(folder / f"process{jax.process_index()}" if several else folder):
        yield
        jax.block_until_ready(jax.tree.leaves(nnx.state(optimizer)))


def measure(
    train_step: Jit, model: nnx.Module, optimizer: nnx.Optimizer, batch: Row, folder: Path
) -> Profile:
    """Measures each fragment and transfer; writes profile/fragments.txt, and both timelines to timeline.png.

    It takes a step, and holds a copy of model and optimizer meanwhile. For one process and several meshes.

    Args:
      folder: of the run.
    """
    program = train_step.program(model, optimizer, batch)
    profile = program.profile(model, optimizer, batch)
    (folder / "profile").mkdir(exist_ok=True)
    mm.timeline(program, profile).save(folder / "timeline.png")
    (folder / "profile" / "fragments.txt").write_text(f"{profile}\n")
    return profile
