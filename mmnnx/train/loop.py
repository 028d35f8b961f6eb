"""A run from its first step to its last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

import mmnnx as mm
from mmnnx.inspect import draw_loss, draw_timeline
from mmnnx.modules import LM, LMConfig
from mmnnx.plan.chips import chip_of
from mmnnx.plan.language_models import flops_of_token
from mmnnx.train.average import averaged
from mmnnx.train.batches import train_batches, valid_batches
from mmnnx.train.checkpoint import CheckpointError, Checkpoints
from mmnnx.train.checkpoint.step_folders import replaced
from mmnnx.train.config import BEFORE_PROFILE, TrainConfig
from mmnnx.train.data import Corpus, load_corpus
from mmnnx.train.devices import choose_devices
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.lockstep import is_first, raise_in_all
from mmnnx.train.memory import make_peak_bytes
from mmnnx.train.metrics import Meter, Work
from mmnnx.train.profile import measure, traced
from mmnnx.train.progress import Display
from mmnnx.train.rows import Packed, Rows, rows_of
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.sample import sample
from mmnnx.train.signals import Stop
from mmnnx.train.step import (
    create,
    learning_rate,
    make_abstract,
    make_train_step,
    make_validate,
    model_config,
    place,
    with_schedule,
)
from mmnnx.train.tokens import codec_of
from mmnnx.train.trackers import Trackers, check_installed


def train(config: TrainConfig) -> RunFolder:
    """Train the model that ``config`` describes; returns the folder of the run.

    With several processes, every process calls it after `mm.initialize()`; the first one prints and writes
    for all.

    Raises, in every process: UserError before anything runs if the config cannot be carried out, Diverged if
    a loss is not finite, and Interrupted after Ctrl-C or SIGTERM, once the run is saved.

    Example:
      >>> _ = Path("book.txt").write_text("Call me Ishmael. " * 1000)
      >>> small = dict(layers=1, width=32, batch=8, sequence=32, microbatches=2, stages=1, tensor=1)
      >>> run = train(TrainConfig(data=Path("book.txt"), out=Path("run"), steps=2, **small))
      44,128 parameters on 1 x 1 cpu devices, ...
      >>> run.rows()[-1]["step"]
      2
    """
    first, claimed = is_first(), contextlib.ExitStack()
    with raise_in_all(UserError):
        config.validate()
        if first:
            check_installed(config)
        automatic, config = config.schedule == "auto", with_schedule(config)
        codec, sizes = codec_of(config.model), model_config(config)
        if codec.vocab > sizes.vocab:
            raise UserError(
                f"{config.model} has {sizes.vocab} tokens, and its tokenizer {codec.vocab} (without a "
                "tokenizer.json a token is a byte)"
            )
        corpus = load_corpus(config.data, codec)
        rows = rows_of(corpus.train, config.sequence, config.packing)
        batches = train_batches(rows, config.batch, config.seed)
        held_out = valid_batches(rows_of(corpus.valid, config.sequence, config.packing), config.batch)
    with raise_in_all(UserError, CheckpointError):  # JAX starts here, which needs all processes
        mesh, placement = place(config, choose_devices(config.devices))
        folder = RunFolder(config.folder(), config.checkpoints)
        if first and not config.resume:
            RunFolder.create(config)
        start = folder.saved or 0
        if start >= config.steps:
            raise UserError(f"the run in {folder.path} has taken {start} steps; to go on give more --steps")
        if not start and (aside := replaced(folder.checkpoints)):
            raise UserError(f"there is no checkpoint in {folder.checkpoints}{aside}")
        if first:
            claimed.callback(folder.claim().release)

    with claimed, mesh, Checkpoints(folder.checkpoints, best="val_bits_per_byte") as checkpoints:
        with raise_in_all(UserError):
            model, optimizer = make_abstract(config) if start else create(config, placement)
        nodes = {"model": model, "optimizer": optimizer}
        if start:
            with raise_in_all(UserError, CheckpointError), averaged(model, optimizer):
                data = checkpoints.restore(nodes, start, sharding=placement).data
                if data["text"] != corpus.checksum:
                    raise UserError(
                        f"the text of the run in {folder.path} has changed since; start another with --name"
                    )
            batches.set_state(data["batches"])
        with raise_in_all(UserError):
            if first:
                folder.begin(config, start)
        train_step, validate = make_train_step(config), make_validate(held_out)
        peak_bytes = make_peak_bytes(train_step, mesh.devices)

        display = Display(config.steps, start, quiet=not first)
        with (
            Trackers(config, folder.path if first else None, start, display.say) as trackers,
            display,
            Stop() as stop,
            with_last_checkpoint(checkpoints),
            contextlib.ExitStack() as profiling,
        ):
            display.say(describe(config, model, corpus, rows, mesh, folder))
            if automatic:
                display.say(f"--schedule auto: {config.schedule}, whose simulated step is the shortest")
            if config.resume and not start:
                display.say("there is no checkpoint to resume: this run begins at its first step")
            done = work(config, sizes, corpus, rows, mesh)
            meter = Meter(folder if first else None, trackers, display, done)
            if not start:
                meter.validation(0, validate(model))
            for step in range(start + 1, config.steps + 1):
                if config.profile and step == start + BEFORE_PROFILE + 1:
                    profiling.enter_context(traced(folder.path / "profile", optimizer))
                with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                    meter.step(step, train_step(model, optimizer, next(batches)))
                if step == start + BEFORE_PROFILE + config.profile:
                    profiling.close()
                stopping = stop(step)
                if stopping or step % config.eval_every == 0 or step == config.steps:
                    meter.flush()
                    memory = peak_bytes(model, optimizer, held_out[0])
                    with averaged(model, optimizer):
                        bits = meter.validation(step, validate(model), memory)
                        checkpoints.save(
                            step,
                            nodes,
                            data={"batches": batches.get_state(), "text": corpus.checksum},
                            config=json.loads(config.to_json()),
                            metrics={"val_bits_per_byte": bits},
                        )
                if stop.signal and stopping and step < config.steps:
                    raise Interrupted(step, stop.signal)

        program = train_step.program(model, optimizer, held_out[0])
        if first:
            with folder.written():
                draw_loss(folder.rows()).savefig(folder.path / "loss.png")
                draw_timeline(program.simulate()).savefig(folder.path / "timeline.png")
        if config.sample:
            prompt = corpus.valid.tokens[: max(1, config.sequence // 4)].astype(np.int32)
            with averaged(model, optimizer):
                tokens = sample(model, prompt, config.sample, config.sequence, seed=config.seed)
            text = codec.decode(tokens)
            display.say(f"--- a sample of its text:\n{text}\n---")
            if first:
                with folder.written():
                    (folder.path / "sample.txt").write_text(text)
        if config.profile and config.stages > 1 and jax.process_count() == 1:  # last, as it takes a step
            with folder.written():
                display.say(str(measure(train_step, model, optimizer, held_out[0], folder.path / "profile")))
    return folder


@contextlib.contextmanager
def with_last_checkpoint(checkpoints: Checkpoints) -> Iterator[None]:
    """Inside, a `Diverged` error gets the step of the latest checkpoint."""
    try:
        yield
    except Diverged as error:
        checkpoints.wait()
        error.saved = checkpoints.latest
        raise


def work(config: TrainConfig, sizes: LMConfig, corpus: Corpus, rows: Rows, mesh: mm.MultiMesh) -> Work:
    """What a step does, for its metrics."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    return Work(
        tokens=config.batch * config.sequence * rows.used,
        flops=flops_of_token(sizes, config.sequence),
        devices=config.devices,
        peak=None if chip is None else chip.flops[config.precision],
        bytes_per_token=corpus.bytes_per_token,
        learning_rate=np.asarray(learning_rate(config)(np.arange(config.steps))),
    )


def describe(
    config: TrainConfig, model: LM, corpus: Corpus, rows: Rows, mesh: mm.MultiMesh, folder: RunFolder
) -> str:
    """What is trained, on what, and where it is kept."""
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    shown = [n for axis, n in config.mesh_axes.items() if n > 1 or axis in ("stage", "model")]
    text = (
        f"{size:,} parameters on {' x '.join(map(str, shown))} {describe_devices(mesh)}, "
        f"{len(corpus.train) + len(corpus.valid):,} {corpus.unit}s of text in {corpus.files:,} "
        f"{'files' if corpus.unit == 'byte' else 'documents'}, run in {folder.path}"
    )
    if not isinstance(rows, Packed):
        return text
    return (
        f"{text}\ndocuments are packed in {len(rows):,} rows of {config.sequence} {corpus.unit}s, which they "
        f"fill to {rows.used:.1%}"
    )


def describe_devices(mesh: mm.MultiMesh) -> str:
    """Such as "cpu devices of 4 processes"; a single process is not mentioned."""
    processes = len({device.process_index for device in mesh.devices.flat})
    of = f" of {processes} processes" if processes > 1 else ""
    return f"{mesh.devices.flat[0].platform} devices{of}"
