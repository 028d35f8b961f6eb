"""The command ``mmnnx eval``: the loss of a published model or of a run on text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from mmnnx.options import optional, parse_options, reported
from mmnnx.train.assistant import LossOn
from mmnnx.train.batches import in_batches
from mmnnx.train.config import Precision
from mmnnx.train.data import load_corpus
from mmnnx.train.errors import UserError, above_zero
from mmnnx.train.evaluate import make_evaluate
from mmnnx.train.read_model import read_model, stage_mesh
from mmnnx.train.rows import Packing, rows_of


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Print the loss of a model on the part of the data that training holds out, or on all of it."""

    model: tyro.conf.Positional[str]
    """The folder of a run, the gs:// URL of its checkpoints, or the folder of a published model.
    Of a run with --ema it is the averages of its weights."""
    data: Path
    """A file or a folder of text, JSON Lines or Parquet, as for `mmnnx train`."""
    packing: Packing = "auto"
    """How documents become sequences, as for `mmnnx train`."""
    loss_on: LossOn = "all"
    """Which tokens of "messages" count, as for `mmnnx train`."""
    all: bool = False
    """Use all of the data, not what is held out alone."""
    batch: int = 16
    """Sequences that are computed together."""
    sequence: int = 128
    """Tokens in a sequence."""
    stages: int = 1
    """Pipeline stages that the layers are split over."""
    tensor: int = 1
    """Devices over which the weights of a stage are split."""
    precision: Annotated[
        Precision | None, optional("{float32,bfloat16}", "that of the run; float32 for a published model")
    ] = None
    """Type to compute in; a published model's weights are kept in it, too."""
    json: bool = False
    """Print JSON."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx eval`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0, or 2 for a mistake in the options.
    """
    config = parse_options(EvalConfig, "eval", options)
    return reported(lambda: show(config), print_error, UserError, ValueError)


def show(config: EvalConfig) -> int:
    """Prints the loss."""
    found = evaluate(config)
    if config.json:
        print(json.dumps(found))
    else:
        text = (
            "loss {loss:.4f} nats per token, perplexity {perplexity:,.2f}, {bits_per_byte:.4f} bits per byte"
        )
        of = " of the assistant" if config.loss_on == "assistant" else ""
        text = f"{text.format(**found)}, {found['tokens']:,} tokens{of}"
        Console(highlight=False).print(text, soft_wrap=True)
    return 0


def evaluate(config: EvalConfig) -> dict[str, float]:
    """The mean loss over tokens; in a stream, what is less than a sequence at the end is left out.

    Returns:
      "loss" in nats per token, "perplexity", "bits_per_byte", and the number of "tokens".

    Raises:
      UserError: for options that cannot be, and data of less than one sequence.
    """
    above_zero(batch=config.batch, sequence=config.sequence)
    with stage_mesh(config.stages, config.tensor):
        model, codec = read_model(config.model, config.stages, config.precision)
        corpus = load_corpus(config.data, codec, config.loss_on)
        texts = [corpus.train, corpus.valid] if config.all else [corpus.valid]
        parts = [rows_of(text, config.sequence, config.packing) for text in texts]
        batches = (batch for rows in parts for batch in in_batches(rows, range(len(rows)), config.batch))
        total, tokens = make_evaluate()(model, batches)
    if not tokens:
        raise UserError(
            f"--data has {' and '.join(str(len(text)) for text in texts)} {corpus.unit}s to evaluate, and a "
            f"--sequence of {config.sequence} needs {config.sequence + 1}; give more text, --all, or a "
            "smaller one"
        )
    loss = total / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": loss
        / math.log(2)
        * sum(text.counted for text in texts)
        / sum(text.bytes for text in texts),
        "tokens": int(tokens),
    }
