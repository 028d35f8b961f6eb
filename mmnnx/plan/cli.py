"""The command ``mmnnx plan``."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from rich.console import Console

from mmnnx.exit_status import FAILED
from mmnnx.inspect.cells import cell
from mmnnx.inspect.rich_output import print_table, table_console
from mmnnx.mpmd.compile import compile_program
from mmnnx.options import optional, parse_options, reported
from mmnnx.output import current
from mmnnx.plan.language_models import TrainingJob
from mmnnx.plan.planning import Plan, plan_suffix
from mmnnx.plan.report import WIDTH
from mmnnx.plan.search import SEARCHED, search


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Compile a language model's train step for a machine that is not here: does it fit, and how fast is it?

    Nothing runs. For TPUs install mmnnx[tpu], for GPUs mmnnx[cuda12].
    """

    target: str
    """The machine: a chip and its topology (v5p:4x4x8), or hosts x GPUs (h100:4x8)."""
    model: str = "llama3-8b"
    """A preset of LMConfig or MoELMConfig: llama3-70b, mixtral-8x7b, moe-62b, ..."""
    search: bool = False
    """Rank all stages x tensor x data x rows x schedule x remat by formulas, and compile the best few.
    Those that are given stay, and so do context and expert."""
    compile_best: int = 3
    """How many to compile in a search."""
    stages: Annotated[int | None, optional("INT", "4")] = None
    """Meshes that the machine is divided into, with a pipeline stage on each (or several, see schedule)."""
    tensor: Annotated[int | None, optional("INT", "1")] = None
    """Devices over which the weights of a stage are split (tensor parallelism): heads, MLP, vocabulary."""
    data: Annotated[int | None, optional("INT", "1")] = None
    """Groups of such devices in a stage, among which the sequences of a microbatch are divided."""
    context: int = 1
    """Devices over which each sequence is split (context parallelism); see --attention."""
    expert: int = 1
    """Devices over which the experts of a model are split (expert parallelism), and sequences, too.
    With 1, --tensor splits experts, or the hidden features of wide ones."""
    batch: int = 32
    """Sequences in a step."""
    sequence: int = 4096
    """Tokens in a sequence."""
    rows: Annotated[int | None, optional("INT", "1")] = None
    """Sequences in a microbatch, for each of the devices that these are divided among (data x expert)."""
    schedule: Annotated[str | None, optional("NAME", "1f1b")] = None
    """Order of the microbatches' forwards and backwards; `mmnnx schedule` lists them."""
    interleave: int = 2
    """Stages on each mesh, for schedules that have several."""
    remat: bool = False
    """Compute each block again in the backward. Without it, a search tries both."""
    fsdp: bool = False
    """Divide weights and optimizer state among the groups of --data, too."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's first moment."""
    layers: Annotated[int | None, optional("INT", "the preset's")] = None
    """Blocks of the model."""
    loss_chunks: int = 1
    """Parts of the sequence whose logits are made one after the other, for a large vocabulary."""
    attention_chunks: int = 1
    """Parts of the sequence whose attention scores are made one after the other, for a long sequence."""
    attention: Annotated[
        Literal["xla", "cudnn", "flash", "ring"] | None, optional("NAME", "ring with --context, else xla")
    ] = None
    """How attention is computed: "cudnn" is flash attention on GPUs, "flash" on TPUs; "xla" makes all scores.
    "ring": the devices of --context pass keys and values around. With "flash" each has all tokens of some
    heads instead, if these can be divided; others gather keys and values."""
    scan: bool = False
    """Stack the blocks and scan them, divided between the stages: one block is compiled for all."""
    json: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write all figures to."""
    save: Annotated[Path | None, optional("FILE", "none")] = None
    """File to write to: the picture (.svg, .png, .pdf), the whole report (.html), its figures (.json),
    or what was compiled (.executables)."""

    def job(self) -> TrainingJob:
        names = [field.name for field in dataclasses.fields(TrainingJob)]
        given = {name: getattr(self, name) for name in names}
        if self.search:  # the division that a search begins with fits any machine
            given |= {name: 1 for name in ("stages", "data") if given[name] is None}
        return TrainingJob(**{name: value for name, value in given.items() if value is not None})

    def given(self) -> list[str]:
        """What a search leaves as it is."""
        return [name for name in SEARCHED if getattr(self, name) not in (None, False)]


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx plan`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0 if the step fits; 1 if it does not; 2 for a mistake in the options.
    """
    jax.config.update("jax_platforms", "cpu")  # what is here does not matter, and JAX would look for it
    config = parse_options(PlanConfig, "plan", options)
    return reported(lambda: show(config, print_error), print_error, ValueError, ImportError, RuntimeError)


def show(config: PlanConfig, print_error: Callable[[str], None]) -> int:
    """Prints a plan, or what a search finds, and writes its files. Returns the exit status.

    Raises ValueError for options that cannot be, ImportError where a compiler is not installed, and
    RuntimeError for what it refuses.
    """
    console = table_console(WIDTH)
    job = config.job()
    if config.save is not None:
        plan_suffix(config.save)
    files = [path for path in (config.json, config.save) if path is not None]
    for path in files:
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if config.compile_best < 1:
        raise ValueError(f"--compile-best {config.compile_best}: a search compiles at least one")
    if config.search:
        with progress(console, f"searching for {job.model} on {job.target}"):
            found = search(job, config.given(), config.compile_best)
        print_table(console, found)
        if found.best is None:
            for path in files:
                console.print(f"{path} is not written: there is no plan", markup=False, soft_wrap=True)
            return FAILED
        job, plan = found.best
    else:
        with progress(console, f"compiling {job.model} for {job.target}"):
            plan = job.plan()
    print_table(console, plan)
    for line in throughput(job, plan):
        console.print(line)
    if config.json is not None:
        config.json.write_text(json.dumps(to_json(job, plan), indent=2))
        console.print(f"wrote {config.json}", markup=False, soft_wrap=True)
    if config.save is not None:
        try:
            plan.save(config.save)
        except ValueError as error:  # it does not fit
            print_error(str(error))
            return FAILED
        console.print(f"wrote {config.save}", markup=False, soft_wrap=True)
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
    """Shows which fragment was compiled last, or nothing with --quiet."""
    if current.get().quiet:
        yield
        return
    with console.status(cell(text)) as status:

        class Show(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                status.update(cell(f"{text}: {record.getMessage()}"))

        handler, level = Show(), compile_program.logger.level
        compile_program.logger.addHandler(handler)
        compile_program.logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            compile_program.logger.removeHandler(handler)
            compile_program.logger.setLevel(level)
