"""Saves and restores the state of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils.epath import Path as FilePath
from filelock import FileLock

from mmnnx.sharding.path_filter import path_text
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.rules import did_you_mean
from mmnnx.train.checkpoint.agreement import all_or_none, check_same, exchange, leave
from mmnnx.train.checkpoint.errors import CheckpointError, DamagedError, Differences, Path
from mmnnx.train.checkpoint.keys import stored_as
from mmnnx.train.checkpoint.lock import NoLock, claim
from mmnnx.train.checkpoint.nnx_state import arrays_of, set_arrays
from mmnnx.train.checkpoint.paths import folder_at, in_bucket
from mmnnx.train.checkpoint.placement import check_rules, describe_placement
from mmnnx.train.checkpoint.rename import Rename
from mmnnx.train.checkpoint.restore import restore_arrays, targets_of
from mmnnx.train.checkpoint.shared import check_shared
from mmnnx.train.checkpoint.step_folders import (
    JSON,
    STATE,
    advice,
    checksum,
    clear,
    read_json,
    remove,
    replaced,
    set_aside,
    steps_in,
    unfinished,
)
from mmnnx.train.checkpoint.write import copy_shards, make_writer, reason

UNSTORED = ("uint2", "uint4")
"""Types of JAX that tensorstore's Zarr 3 has not."""

_writers: dict[FilePath, Checkpoints] = {}
"""The `Checkpoints` of this process that is writing, by folder."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides the state.

    Attributes:
      step: the step it was saved at.
      data, config, metrics: what was given to `save`, or None.
      left: with `partial=True`, how checkpoint and nodes differ: what was not read, and what was not set.

    Example:
      >>> with Checkpoints("run") as checkpoints:
      ...     checkpoints.save(7, {"model": model}, metrics={"loss": 2.5})
      >>> restored = Checkpoints("run").restore({"model": model})
      >>> restored.step, restored.metrics
      (7, {'loss': 2.5})
    """

    step: int
    data: Any
    config: Any
    metrics: dict[str, float] | None
    left: Differences


class Checkpoints:
    """The checkpoints in a folder: the latest few, and the best.

    With several processes, every process makes one, calls its methods in the same order, and sees the same
    folder. In a bucket nothing is locked: one process, or one such group, may save to a folder at a time.

    Args:
      folder: where they are kept: a path, or the URL of a folder in a bucket of Google Cloud Storage
        ("gs://bucket/run", with `pip install "mmnnx[gcs]"`). It is made when the first is saved.
      keep: how many of the latest are kept.
      best: the name of a metric; the checkpoint with its lowest value is kept too.

    Raises:
      ValueError: for another URL, a path with `*`, `?` or `[` in it (in a bucket `#` too), or `keep` below 1.

    Example:
      >>> with Checkpoints("run/checkpoints", best="loss") as checkpoints:
      ...     checkpoints.save(100, {"model": model, "optimizer": optimizer}, metrics={"loss": 2.5})
      >>> Checkpoints("run/checkpoints").restore({"model": model}).step
      100
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 1, best: str | None = None):
        if not hasattr(keep, "__index__") or keep < 1:
            raise ValueError(f"keep={keep!r}: it is how many are kept, one or more")
        if not isinstance(best, str | None):
            raise TypeError(f"best={best!r}: it is the name of a metric")
        self.folder = folder_at(folder)
        self._keep, self._best = keep, best
        self._entered, self._closed = False, False
        self._shared = False  # whether all processes are known to see the folder
        self._last: int | None = None  # the last step that was saved since this was opened
        self._under_way = False  # whether nobody has waited for it yet
        self._lock: FileLock | NoLock | None = None  # held while a checkpoint is being written
        self._aside: dict[int, FilePath] = {}  # by their steps, those renamed for the checkpoint under way

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, earliest first."""
        return steps_in(self.folder)

    @property
    def latest(self) -> int | None:
        """The latest step; None without checkpoints."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step whose metric is the lowest; None if no checkpoint has it."""
        values = {step: self._metric(step) for step in self.steps}
        known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        return min(known, key=lambda step: (known[step], -step), default=None)

    def save(
        self,
        step: int,
        nodes: Mapping[str, Any],
        *,
        data: Any = None,
        config: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves the state of NNX objects.

        In a `with` it returns as soon as the state may change or be donated, and writes in the background;
        the checkpoint exists once all of it is written. It waits for an earlier one that is still being
        written. Elsewhere, where nothing would wait for it at the end, it returns when all is written.
        Checkpoints of this step and of later steps are renamed, not deleted: they are from before the run
        went back.

        Args:
          step: the number of steps taken.
          nodes: NNX objects by name: modules, optimizers, `nnx.Rngs`, metrics.
          data: the position in the data, as JSON.
          config: anything else, as JSON.
          metrics: numbers by name, among them the one that `best` names.

        Raises:
          TypeError, ValueError: for what cannot be saved; nothing is written then.
          CheckpointError: another process is writing to the folder, processes do not see the same folder, or
            this checkpoint or the one before it cannot be written. Complete checkpoints stay as they are, and
            those renamed for it get their names back; in a bucket they do not, and the message names them.

        Example:
          >>> with Checkpoints("run/checkpoints") as checkpoints:
          ...     checkpoints.save(200, {"model": model, "rngs": nnx.Rngs(0)}, data={"next_index": 800})
        """
        if self._closed:
            raise ValueError(f"{self.folder} is closed: step {step} must be saved before that")
        if not hasattr(step, "__index__") or step < 0:
            raise ValueError(f"step={step!r}: steps are counted from 0")
        arrays = arrays_of(nodes)
        for path, x in arrays.items():
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(f"{path_text(path)} is a ShapeDtypeStruct, which has no values")
            if (name := stored_as(x)[1].name) in UNSTORED:
                raise TypeError(f"{path_text(path)} is {name}, for which Zarr has no type: save it as uint8")
        if metrics and self._best is not None and self._best not in metrics:
            raise ValueError(
                f"metrics= has no {self._best!r}, by which the best is chosen (best=)"
                f"{did_you_mean(self._best, metrics)}: it has {', '.join(map(repr, metrics))}"
            )
        numbers = None if metrics is None else {name: float(value) for name, value in metrics.items()}
        values = {"placement": describe_placement(arrays), "data": data, "config": config, "metrics": numbers}
        values = {name: _json(name, value) for name, value in values.items() if value is not None}
        earlier = _writers.get(self.folder, self)
        earlier.wait()  # so that the host never holds two copies of the state
        tree: dict[str, Any] = {}
        for path, shards in copy_shards(arrays).items():
            _put(tree, path, shards)
        check_same(f"saves {', '.join(nodes)} at step {step}")
        self._aside = {}
        with all_or_none(), self._writing(step):
            if jax.process_index() == 0:
                self._claim(step)
        if not self._shared:
            try:
                check_shared(self.folder)
            except CheckpointError:
                self._put_back(step)
                self._release()
                raise
            self._shared = True
        self._last, self._under_way, _writers[self.folder] = step, True, self
        items = {name: ocp.args.JsonSave(value) for name, value in values.items()}
        try:
            with self._writing(step):
                self._orbax.save(
                    self.folder / str(step),
                    args=ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(tree)}, **items),
                    custom_metadata={"checksums": {name: checksum(value) for name, value in values.items()}},
                )
        except BaseException:
            self._release()
            raise
        if not self._entered:
            self.wait()

    def restore(
        self,
        nodes: Mapping[str, Any],
        step: int | None = None,
        *,
        sharding: TaskSharding | None = None,
        partial: bool = False,
        rename: Rename | None = None,
    ) -> Restored:
        """Sets the state of NNX objects to what was saved, on whatever devices and processes.

        Each array is read to where it lives now, each device reading its own part. Objects of the checkpoint
        that are not among `nodes` are not read. Layers in a list and layers stacked for a scan match each
        other.

        Args:
          nodes: NNX objects by the names they were saved under. Those made by `nnx.eval_shape` get arrays: no
            initial values are made, and memory need not hold old and new state together.
          step: which one. Default: the latest.
          sharding: where the state of abstract nodes goes. Default: to the default device.
          partial: restore what fits by path, shape and dtype, and leave the rest of the nodes as it is.
          rename: {"old.prefix": "new.prefix"}, or a function from the path in the checkpoint, with slashes
            ("model/embed/embedding"), to that in the nodes.

        Returns:
          What was saved besides the state; with `partial`, also how checkpoint and nodes differ.

        Raises:
          CheckpointError: there is no such checkpoint, or it is damaged: nodes are as they were. The message
            names the newest good one.
          StructureError: nodes have other state than the checkpoint; raised before anything is read.
          PlacementError: `sharding` does not place the state, or has a rule that places nothing.

        Example:
          >>> with Checkpoints("run/checkpoints") as checkpoints:
          ...     checkpoints.save(300, {"model": model})
          >>> model = nnx.eval_shape(make)  # shapes alone; and two stages instead of four
          >>> with mm.MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "model")):
          ...     placement = mm.pipeline_sharding(model, stages=2)
          ...     Checkpoints("run/checkpoints").restore({"model": model}, sharding=placement).step
          300
        """
        wanted = targets_of(nodes, sharding)
        self.wait()
        which = "the latest step" if step is None else f"step {step}"
        check_same(f"restores {', '.join(nodes)} of {which}")
        step = self._choose(step)
        folder = self.folder / str(step)
        with all_or_none():
            try:
                extras = {name: read_json(folder, name) for name in JSON}
                placement = extras.pop("placement")
                if sharding is not None:
                    check_rules(sharding, nodes, placement["state"])
                arrays, left = restore_arrays(folder, placement, wanted, partial=partial, rename=rename)
            except DamagedError as error:
                raise DamagedError(f"{error}. {advice(self.folder, step)}") from error
        set_arrays(nodes, arrays)
        return Restored(step, left=left, **extras)

    def wait(self) -> None:
        """Waits until the last checkpoint is written. Raises CheckpointError if it cannot be."""
        if self._under_way:
            self._finish(all_or_none())

    def close(self) -> None:
        """Waits until everything is written. After that nothing can be saved, except in another `with`."""
        self._closed = True
        self.wait()
        if self._last is not None:
            self._orbax.close()
            del self._orbax
            self._last = None

    def __enter__(self) -> Checkpoints:
        self._entered, self._closed = True, False
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._entered = False
        if error is not None and self._under_way:
            leave(error)  # the others may be in a step that this process does not come to
            self._finish(contextlib.nullcontext())
        self.close()

    def _finish(self, agreement: contextlib.AbstractContextManager[None]) -> None:
        """Waits for the checkpoint under way, and raises in the agreement if it is not written."""
        assert self._last is not None
        self._under_way = False
        try:
            with agreement:
                with self._writing(self._last):
                    self._orbax.wait_until_finished()
                if self._lock is not None:
                    remove(self.folder, self._old())
        finally:
            self._release()

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Inside, a failed write is a CheckpointError that names the step, and the latest checkpoint."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            self._put_back(step)
            # gcsfs raises errors of many types.
            if not (in_bucket(self.folder) or isinstance(error, OSError | ValueError)):
                raise
            kept = "there is no other" if self.latest is None else f"that of step {self.latest} is the latest"
            for old, path in self._aside.items():
                kept += f"; {path.name} was set aside: to restore it rename it to {old}"
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} was not written: {reason(error)}; {kept}"
            ) from error

    def _claim(self, step: int) -> None:
        """Locks the folder for writing, renames checkpoints of this step and of later ones, and deletes those
        that are not finished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = NoLock() if in_bucket(self.folder) else claim(self.folder)
        if self._lock is None:
            raise CheckpointError(f"another process is writing a checkpoint in {self.folder}")
        try:
            for later in [s for s in self.steps if s >= step]:
                self._aside[later] = set_aside(self.folder / str(later))
            clear(self.folder)
        except BaseException:
            self._put_back(step)
            self._release()
            raise

    def _put_back(self, step: int) -> None:
        """Renames what was set aside for the checkpoint of a step back, unless that is complete.

        Not in a bucket, which renames file by file, and has just failed: a checkpoint might be lost.
        """
        if in_bucket(self.folder):
            return
        if step in self.steps:
            self._aside = {}
        for later, path in list(self._aside.items()):
            with contextlib.suppress(OSError):  # what is raised says why the write failed, and names these
                path.rename(self.folder / str(later))
                del self._aside[later]

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        if _writers.get(self.folder) is self:
            del _writers[self.folder]

    @functools.cached_property
    def _orbax(self) -> ocp.AsyncCheckpointer:
        return make_writer()

    def _choose(self, step: int | None) -> int:
        steps = json.loads(exchange(json.dumps(self.steps))[0])  # those that process 0 sees
        if not steps:
            half = "".join(f"; {left.name} was not finished" for left in unfinished(self.folder))
            raise CheckpointError(f"there is no checkpoint in {self.folder}{half}{replaced(self.folder)}")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step!r} in {self.folder}; there are those of "
                f"{', '.join(map(str, steps))}"
            )
        return steps[-1] if step is None else step

    def _old(self) -> list[int]:
        """Steps to delete. One whose metrics cannot be read is kept, as it may be the best."""
        older = self.steps[: -self._keep]
        kept = {self.best, *(step for step in older if self._metric(step) is None)}
        return [step for step in older if step not in kept]

    def _metric(self, step: int) -> float | None:
        """The metric by which the best is chosen; nan without one, None if it cannot be read."""
        if self._best is None:
            return math.nan
        try:
            return (read_json(self.folder / str(step), "metrics") or {}).get(self._best, math.nan)
        except DamagedError:
            return None


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}= is saved as JSON, and cannot be: {error}") from error
