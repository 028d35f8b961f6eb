"""A run from its first step to its last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM
from mmnnx.train.accelerators import on_virtual_devices
from mmnnx.train.average import averaged
from mmnnx.train.checkpoint import CheckpointError, Checkpoints
from mmnnx.train.checkpoint.shared import check_shared
from mmnnx.train.checkpoint.step_folders import replaced
from mmnnx.train.config import TrainConfig
from mmnnx.train.describe import describe, work
from mmnnx.train.devices import choose_devices
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.evaluate import make_validate
from mmnnx.train.inputs import Data, read_data
from mmnnx.train.lockstep import is_first, raise_in_all
from mmnnx.train.memory import make_peak_bytes
from mmnnx.train.metrics import Meter
from mmnnx.train.optimizers import learning_rate
from mmnnx.train.profile import traced
from mmnnx.train.progress import Display
from mmnnx.train.results import draw_pictures, write_profile, write_sample
from mmnnx.train.run import Run
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.signals import Stop
from mmnnx.train.step import (
    create,
    make_abstract,
    make_train_step,
    place,
    with_schedule,
)
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
    first = is_first()
    with raise_in_all(UserError):
        config.validate()
        if first:
            check_installed(config)
        asked, config = config, with_schedule(config)
        data = read_data(config)
    with raise_in_all(UserError, CheckpointError):  # JAX starts here, which needs all processes
        mesh, placement = place(config, choose_devices(config.devices))
        folder = RunFolder(config.folder(), config.checkpoints)
    with raise_in_all(CheckpointError):
        check_shared(folder.checkpoints.parent)
    with raise_in_all(UserError, CheckpointError):
        start, lock = open_folder(config, folder)

    with (
        lock,
        mesh,
        Checkpoints(folder.checkpoints, keep=config.keep, best="val_bits_per_byte") as checkpoints,
    ):
        before = config
        if start:
            model, optimizer, before = restore(config, placement, data, checkpoints, start)
        else:
            with raise_in_all(UserError):
                model, optimizer = create(config, placement)
        with raise_in_all(UserError):
            if first:
                folder.begin(config, start)
        run = Run(config, data, folder, start, mesh, model, optimizer, make_train_step(config))

        display = Display(config.steps, start, quiet=not first)
        with Trackers(config, folder.path if first else None, start, display.say) as trackers, display:
            display.say(describe(run))
            there = jax.devices()
            if mesh.devices.flat[0].platform == "cpu" and there[0].platform != "cpu":
                display.say(on_virtual_devices(config.devices, len(there), there[0].platform))
            if asked.schedule == "auto":
                display.say(f"--schedule auto: {config.schedule}, whose simulated step is the shortest")
            if before.steps != config.steps:
                was, now = (float(learning_rate(c)(start)) for c in (before, config))
                display.say(
                    f"--steps {config.steps} instead of {before.steps}: the learning rate falls over all of "
                    f"them, and is {now:.3g} where it was {was:.3g}"
                )
            if config.resume and not start:
                display.say("there is no checkpoint to resume: this run begins at its first step")
            take_steps(run, Meter(folder if first else None, trackers, display, work(run)), checkpoints)

        draw_pictures(run)
        if config.sample:
            write_sample(run, display)
        if config.profile and config.stages > 1 and jax.process_count() == 1:  # last, as it takes a step
            write_profile(run, display)
    return folder


def take_steps(run: Run, meter: Meter, checkpoints: Checkpoints) -> None:
    """All steps of a run, with its validations, each of which is followed by a checkpoint.

    Raises, in every process:
      Diverged: if a loss is not finite.
      Interrupted: after a signal, once the run is saved.
    """
    config, data, model, optimizer = run.config, run.data, run.model, run.optimizer
    validate, peak_bytes = make_validate(data.held_out), make_peak_bytes(run.train_step, run.mesh.devices)
    traced_first = first_traced(run)
    with Stop() as stop, with_last_checkpoint(checkpoints), contextlib.ExitStack() as profiling:
        if not run.start:
            meter.validation(0, validate(model))
        for step in range(run.start + 1, config.steps + 1):
            if config.profile and step == traced_first:
                profiling.enter_context(traced(run.folder.path / "profile", optimizer))
            with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
                meter.step(step, run.train_step(model, optimizer, next(data.batches)))
            if step == traced_first + config.profile - 1:
                profiling.close()
            stopping = stop(step)
            if stopping or step % config.eval_every == 0 or step == config.steps:
                meter.flush()
                memory = peak_bytes(model, optimizer, data.held_out[0])
                with averaged(model, optimizer):
                    save(run, step, meter.validation(step, validate(model), memory), checkpoints)
            if stop.signal and stopping and step < config.steps:
                raise Interrupted(step, stop.signal)


def first_traced(run: Run) -> int:
    """The first step that `--profile` traces: the third, as two compile; earlier if few steps are left."""
    return max(run.start + 1, min(run.start + 3, run.config.steps - run.config.profile + 1))


def save(run: Run, step: int, bits: float, checkpoints: Checkpoints) -> None:
    """A checkpoint after a step, with the validation loss there in bits per byte."""
    checkpoints.save(
        step,
        {"model": run.model, "optimizer": run.optimizer},
        data={"batches": run.data.batches.get_state(), "text": run.data.corpus.checksum},
        config=json.loads(run.config.to_json()),
        metrics={"val_bits_per_byte": bits},
    )


def open_folder(config: TrainConfig, folder: RunFolder) -> tuple[int, contextlib.AbstractContextManager[Any]]:
    """Makes the folder of a new run, or goes on with that of an earlier one.

    Returns:
      The step of its latest checkpoint, 0 without one; and a context that gives up the lock on it, which the
      first process holds.

    Raises:
      UserError: for a folder that is in use or cannot be written, or a run that has taken all its steps.
    """
    first, lock = is_first(), contextlib.ExitStack()
    if first and not config.resume:
        RunFolder.create(config)
    start = folder.saved or 0
    if start >= config.steps:
        raise UserError(f"the run in {folder.path} has taken {start} steps; to go on give more --steps")
    if not start and (aside := replaced(folder.checkpoints)):
        raise UserError(f"there is no checkpoint in {folder.checkpoints}{aside}")
    if first:
        lock.callback(folder.claim().release)
    return start, lock


def restore(
    config: TrainConfig, placement: mm.TaskSharding, data: Data, checkpoints: Checkpoints, step: int
) -> tuple[LM, nnx.Optimizer, TrainConfig]:
    """Model and optimizer as they were after a step, on their devices, and the config of then; the next batch
    is the one after it.

    Raises, in every process:
      UserError: for a checkpoint that cannot be read, and for data that has changed since.
    """
    with raise_in_all(UserError):
        model, optimizer = make_abstract(config)
    with raise_in_all(UserError, CheckpointError), averaged(model, optimizer):
        nodes = {"model": model, "optimizer": optimizer}
        restored = checkpoints.restore(nodes, step, sharding=placement)
        saved = restored.data
        if saved["text"] != data.corpus.checksum:
            raise UserError(
                f"the text of the run in {config.folder()} has changed since; start another with --name"
            )
    data.batches.set_state(saved["batches"])
    return model, optimizer, TrainConfig.from_json(json.dumps(restored.config))


@contextlib.contextmanager
def with_last_checkpoint(checkpoints: Checkpoints) -> Iterator[None]:
    """Inside, a `Diverged` error gets the step of the latest checkpoint."""
    try:
        yield
    except Diverged as error:
        checkpoints.wait()
        error.saved = checkpoints.latest
        raise
