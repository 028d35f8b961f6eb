"""The command ``mmnnx export``: the model of a run as a folder that other programs load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from flax import nnx

from mmnnx.options import optional, parse_options, reported
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.errors import UserError
from mmnnx.train.run_folder import read_run
from mmnnx.train.step import make_model, published


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write the model of a run as a folder of the Hugging Face hub: safetensors, config and tokenizer."""

    run: tyro.conf.Positional[str]
    """The folder of the run, or the gs:// URL of its checkpoints; with --ema, the averages of its weights."""
    folder: tyro.conf.Positional[Path]
    """The folder to write, new or empty."""
    step: Annotated[int | None, optional("INT", "the latest")] = None
    """Step of the checkpoint."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        optional("{float32,bfloat16,float16}", "that of the model the run started from; float32 without one"),
    ] = None
    """Type of the weights."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx export`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0, or 2 for a mistake in the options.
    """
    config = parse_options(ExportConfig, "export", options)

    def action() -> int:
        print(f"wrote the model of step {export(config)} to {config.folder}")
        return 0

    return reported(action, print_error, UserError, ValueError)


def export(config: ExportConfig) -> int:
    """Writes the folder; returns the step. The model is read to the memory of this host.

    Raises:
      UserError: for a folder that is no run, or one without such a checkpoint.
      FileExistsError: if the folder to write holds something.
    """
    folder, trained = read_run(config.run)
    model = nnx.eval_shape(lambda: make_model(trained))
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore({"model": model}, config.step)
    dtype = None if config.dtype is None else jnp.dtype(config.dtype)
    longest = trained.sequence if trained.model is None else None  # a published model says it
    published().save(model, config.folder, like=trained.model, dtype=dtype, max_position_embeddings=longest)
    return restored.step
