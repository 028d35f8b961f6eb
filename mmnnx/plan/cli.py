"""The command ``mmnnx plan``."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from mmnnx.inspect.schedule_cli import optional
from mmnnx.mpmd.compile import compile_program
from mmnnx.plan.language_models import TrainingJob
from mmnnx.plan.planning import Plan
from mmnnx.plan.report import WIDTH


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Compile a language model's train step for a machine that is not here: does it fit, and how fast is it?

    Nothing runs. For TPUs install mmnnx[tpu], for GPUs mmnnx[cuda12].
    """

    target: str
    """The machine: a chip and its topology (v5p:4x4x8), or hosts x GPUs (h100:4x8)."""
    model: str = "llama3-8b"
    """A preset of LMConfig or MoELMConfig: llama3-70b, mixtral-8x7b, moe-62b, ..."""
    stages: int = 4
    """Pipeline stages."""
    tensor: int = 1
    """Devices along the axis over which weights are split: heads, MLP, vocabulary, experts."""
    data: int = 1
    """Devices along the axis over which the rows of a microbatch are split."""
    batch: int = 32
    """Sequences in a step."""
    sequence: int = 4096
    """Tokens in a sequence."""
    rows: int = 1
    """Sequences in a microbatch, for each device along the data axis."""
    schedule: str = "1f1b"
    """Order of the microbatches' forwards and backwards; `mmnnx schedule` lists them."""
    remat: bool = False
    """Compute each block again in the backward."""
    fsdp: bool = False
    """Divide weights and optimizer state over the data axis, too."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's first moment."""
    layers: Annotated[int | None, optional("INT", "the preset's")] = None
    """Blocks of the model."""
    loss_chunks: int = 1
    """Parts of the sequence whose logits are made one after the other, for a large vocabulary."""
    scan: bool = False
    """Scan the blocks of a stage: one of them is compiled for all."""
    json: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write all figures to."""
    save: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write the picture to (.svg, .png, .pdf), or the whole report (.html)."""

    def job(self) -> TrainingJob:
        names = [field.name for field in dataclasses.fields(TrainingJob)]
        return TrainingJob(**{name: getattr(self, name) for name in names})


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx plan`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0 if the step fits; 1 if it does not; 2 for a mistake in the options.
    """
    # What is here does not matter, and JAX would look for it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    config = tyro.cli(PlanConfig, args=options, prog="mmnnx plan", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    try:
        job = config.job()
        with progress(console, f"compiling {job.model} for {job.target}"):
            plan = job.plan()
        console.print(plan)
        for line in throughput(job, plan):
            console.print(line)
        if config.json is not None:
            config.json.write_text(json.dumps(to_json(job, plan), indent=2))
            console.print(f"wrote {config.json}", markup=False, soft_wrap=True)
        if config.save is not None:
            plan.save(config.save)
            console.print(f"wrote {config.save}", markup=False, soft_wrap=True)
    except (ValueError, ImportError, RuntimeError) as error:
        print_error(str(error))
        return 2
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}")
        return 2
    return int(plan.fits is False)


def to_json(job: TrainingJob, plan: Plan) -> dict[str, Any]:
    """The figures of a plan, with those of its job."""
    found: dict[str, Any] = {"job": dataclasses.asdict(job), **plan.to_json()}
    if plan.seconds:
        found |= {"tokens_per_second": job.tokens / plan.seconds, "mfu": utilization(job, plan)}
    return found


def throughput(job: TrainingJob, plan: Plan) -> list[str]:
    """Lines on tokens a second, and on the share of the devices' speed that the model itself comes to."""
    if not plan.seconds:
        return []
    speed = job.tokens / plan.seconds
    return [
        f"{speed:,.0f} tokens/s, {speed / plan.devices:,.1f} on each device; "
        f"MFU {utilization(job, plan):.1%} (recomputation not counted, bfloat16)"
    ]


def utilization(job: TrainingJob, plan: Plan) -> float:
    """Model FLOPs utilization (arXiv:2204.02311)."""
    assert plan.chip is not None and plan.seconds
    return job.model_flops() / (plan.seconds * plan.devices * plan.chip.flops["bfloat16"])


@contextmanager
def progress(console: Console, text: str) -> Iterator[None]:
    """Shows which fragment was compiled last."""
    with console.status(text) as status:

        class Show(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                status.update(f"{text}: {record.getMessage()}")

        handler, level = Show(), compile_program.logger.level
        compile_program.logger.addHandler(handler)
        compile_program.logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            compile_program.logger.removeHandler(handler)
            compile_program.logger.setLevel(level)
