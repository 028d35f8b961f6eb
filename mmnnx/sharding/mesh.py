"""The devices of a program: `MultiMesh`, the global mesh, and `TaskMesh`, a submesh for one task."""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import InitVar, dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from mmnnx import _compat
from mmnnx._shown import Shown
from mmnnx.sharding.eager_sharding import advise_on_eager_sharding
from mmnnx.sharding.incompatible_devices import advise
from mmnnx.sharding.registry import Matcher, Registry

_log = logging.getLogger("mmnnx")

# Per thread and re-entrant: each entry has its ExitStack, closed when it is left.
_entered: ContextVar[tuple[tuple[MultiMesh, ExitStack], ...]] = ContextVar("mmnnx_multimesh", default=())


def current_multimesh() -> MultiMesh | None:
    """The innermost `MultiMesh` whose `with` block is open, or None."""
    stack = _entered.get()
    return stack[-1][0] if stack else None


def program_devices() -> list[jax.Device]:
    """The devices in the order of their numbers: those of the current MultiMesh, else `jax.devices()`."""
    multimesh = current_multimesh()
    return list(multimesh.devices.flat) if multimesh is not None else jax.devices()


def devices_key(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """A key for the devices of a mesh; each platform numbers its own from 0."""
    return tuple((d.platform, d.id) for d in mesh.devices.flat)


@contextmanager
def resolve_specs_on(mesh: Mesh) -> Iterator[None]:
    """Make bare PartitionSpecs mean axes of `mesh`, and retrace functions that were traced for another mesh.

    `jax.set_mesh` is not used: under it JAX refuses arrays on fewer devices than the mesh has, and the arrays
    of every task are. What `with mesh:` does allows them.
    """
    _compat.enter_mesh(mesh)
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


class MultiMesh(Shown):
    """A global mesh whose slices are the submeshes of tasks.

    Entered with `with`, it is the mesh that `Task(mesh_slice=...)` slices, and the one whose axes a bare
    PartitionSpec names. Flax's eager sharding is off inside: a `TaskSharding` says where Variables live. To
    JAX's error about arrays on several groups of devices it adds whose they are, and what mm.jit is for. It
    has the attributes of its `jax.sharding.Mesh` (`shape`, `size`, `devices`, ...), and two are equal when
    their meshes are.

    Devices that JAX has and the axes do not need are idle. The logger "mmnnx" warns of them, and the `repr`,
    `mm.tabulate` and `mm.show_placement` list them. With `devices=` there is no warning: the choice is yours.

    Args:
      axis_sizes: size of each axis. Default: the shape of `devices`.
      axis_names: name of each axis.
      devices: devices in mesh order, shaped like `axis_sizes` or flat. Default: the first of
        `jax.devices()`, as many as the axes need.
      global_mesh: a `jax.sharding.Mesh` to take devices, sizes and names from; the other arguments are
        then ignored. Its axes become Auto, the kind that can be divided between tasks.

    Raises:
      ValueError: names without sizes, a length mismatch, a repeated name, a size below one, devices that
        repeat, or a number of devices that does not fit the axes.

    Example:
      >>> mesh = MultiMesh(axis_sizes=(1, 1), axis_names=("stage", "model"))
      >>> dict(mesh.slice(stage=0).shape)
      {'stage': 1, 'model': 1}
    """

    def __init__(
        self,
        *,
        axis_sizes: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        devices: np.ndarray | Sequence[jax.Device] | None = None,
        global_mesh: Mesh | None = None,
    ):
        if global_mesh is not None:
            if not isinstance(global_mesh, Mesh | MultiMesh):
                raise TypeError(
                    f"global_mesh= is a jax.sharding.Mesh, not {global_mesh!r}: devices= takes a list"
                )
            self.mesh = auto_mesh(global_mesh)
        else:
            self.mesh = _global_mesh(axis_sizes, axis_names, devices)
        chosen = global_mesh is None and devices is None  # who gives devices knows which are left
        self.idle = tuple(range(self.mesh.size, len(jax.devices()))) if chosen else ()
        """Numbers of the devices that it leaves idle, as `TaskMesh` counts them on."""
        if self.idle:
            _log.warning("%r: give devices= if they are meant to be idle", self)
        self.registry = Registry()

    def slice(self, **indices: int) -> Mesh:
        """The submesh at one index of each named axis; it keeps all axes, the sliced ones with size 1.

        Raises:
          ValueError: an axis the mesh lacks, or an index outside 0 .. size - 1.

        Example:
          >>> MultiMesh(axis_sizes=(1,), axis_names=("stage",)).slice(stage=0).size
          1
        """
        mesh = self.mesh
        for axis, index in indices.items():
            if axis not in mesh.axis_names:
                raise ValueError(f"cannot slice along {axis!r}: the MultiMesh has the axes {_axes(mesh)}")
            if not 0 <= operator.index(index) < mesh.shape[axis]:
                raise ValueError(
                    f"index {index} is outside axis {axis!r}, which has size {mesh.shape[axis]}: "
                    f"use 0 to {mesh.shape[axis] - 1}"
                )
        selected = tuple(
            slice(indices[axis], indices[axis] + 1) if axis in indices else slice(None)
            for axis in mesh.axis_names
        )
        return Mesh(mesh.devices[selected], mesh.axis_names)

    def register_task(
        self, matcher: Matcher, *, callback: Callable[[str, bool], Any] | None = None, task: Any = None
    ) -> None:
        """`mmnnx.register_task` for programs of this MultiMesh only; it comes before the global ones.

        Example:
          >>> from mmnnx.sharding import Task
          >>> mesh = MultiMesh(axis_sizes=(1,), axis_names=("stage",))
          >>> mesh.register_task("encoder", task=Task("encoder", mesh_slice={"stage": 0}))
        """
        self.registry.add(matcher, callback, task)

    def __enter__(self) -> MultiMesh:
        with ExitStack() as undo:
            undo.enter_context(resolve_specs_on(self.mesh))
            undo.enter_context(nnx.use_eager_sharding(False))
            _entered.set((*_entered.get(), (self, undo.pop_all())))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        *outer, (_, undo) = _entered.get()
        _entered.set(tuple(outer))
        undo.close()
        advise(error, tasks=self.registry.tasks_by_devices)
        advise_on_eager_sharding(error)

    def __getattr__(self, name: str) -> Any:
        if name == "mesh":  # not yet set, as while unpickling: self.mesh would recurse
            raise AttributeError(name)
        return getattr(self.mesh, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultiMesh) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((MultiMesh, self.mesh))

    def __repr__(self) -> str:
        return f"MultiMesh({_axes(self.mesh)}{f'; {idle_text(self.idle)}' if self.idle else ''})"


@dataclass(frozen=True, kw_only=True)
class TaskMesh:
    """The submesh of one task, as device numbers and axes.

    Device numbers are relative to the program: 0 is the first device of the current MultiMesh, or of
    `jax.devices()` when there is none. The devices themselves are looked up by `to_mesh`, so a TaskMesh can
    be made before there are any.

    Args:
      devices: device numbers, in mesh order.
      axis_sizes: size of each axis. Default: one axis over all the devices.
      axis_names: name of each axis. Default: "axis0", "axis1", ...
      abstract: a `jax.sharding.AbstractMesh` to take sizes and names from, instead of the two above.

    Raises:
      ValueError: device numbers that overlap or are negative, sizes that do not fit the number of devices,
        a length mismatch, a repeated name, or `abstract` next to sizes or names.

    Example:
      >>> TaskMesh(devices=[4, 5, 6, 7], axis_sizes=(2, 2), axis_names=("data", "model")).size
      4
    """

    devices: Sequence[int]
    axis_sizes: Sequence[int] = None  # type: ignore[assignment]  # a tuple once made
    axis_names: Sequence[str] = None  # type: ignore[assignment]
    abstract: InitVar[AbstractMesh | None] = None

    def __post_init__(self, abstract: AbstractMesh | None) -> None:
        devices = _device_numbers(self.devices)
        sizes, names = self.axis_sizes, self.axis_names
        if abstract is not None:
            if sizes is not None or names is not None:
                raise ValueError(
                    "a TaskMesh takes its axes from abstract= or from axis_sizes= and axis_names=, not both"
                )
            sizes, names = abstract.axis_sizes, abstract.axis_names
        sizes = (len(devices),) if sizes is None else _whole_sizes("TaskMesh", sizes)
        names = tuple(f"axis{i}" for i in range(len(sizes))) if names is None else tuple(names)
        _check_axes("TaskMesh", sizes, names)
        if math.prod(sizes) != len(devices):
            few_or_many = "too few" if len(devices) < math.prod(sizes) else "too many"
            raise ValueError(
                f"{few_or_many} devices for a TaskMesh of {_sizes(sizes, names)}: the axes need "
                f"{math.prod(sizes)}, and {len(devices)} are given: {list(devices)}"
            )
        for field, value in (("devices", devices), ("axis_sizes", sizes), ("axis_names", names)):
            object.__setattr__(self, field, value)

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def __repr__(self) -> str:
        numbers = tuple(self.devices)
        in_order = range(numbers[0], numbers[0] + len(numbers))
        devices = repr(numbers) if len(numbers) <= 8 else f"{numbers[:2]}, … {len(numbers)} of them"
        if len(numbers) > 8 and numbers == tuple(in_order):
            devices = repr(in_order)
        return f"TaskMesh(devices={devices}, axis_sizes={self.axis_sizes}, axis_names={self.axis_names})"

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def place(self, devices: Sequence[int]) -> TaskMesh:
        """The same axes on other devices.

        Example:
          >>> TaskMesh(devices=[0, 1]).place([2, 3]).devices
          (2, 3)
        """
        return TaskMesh(devices=devices, axis_sizes=self.axis_sizes, axis_names=self.axis_names)

    def to_mesh(self, all_devices: Iterable[jax.Device] | None = None) -> Mesh:
        """The `jax.sharding.Mesh` this stands for, among `all_devices` (default: the program's devices).

        Raises:
          ValueError: a device number that the program does not have.

        Example:
          >>> TaskMesh(devices=[0], axis_names=("model",)).to_mesh().axis_names
          ('model',)
        """
        available = program_devices() if all_devices is None else list(all_devices)
        missing = [number for number in self.devices if number >= len(available)]
        if missing:
            raise ValueError(
                f"device numbers {missing} of the TaskMesh are out of range: the program has "
                f"{len(available)} devices, numbered 0 to {len(available) - 1}"
            )
        return Mesh(_array([available[n] for n in self.devices], self.axis_sizes), self.axis_names)


def idle_text(numbers: Sequence[int]) -> str:
    """That devices are idle: "idle: devices 4-7"; the numbers follow each other."""
    if len(numbers) == 1:
        return f"idle: device {numbers[0]}"
    return f"idle: devices {numbers[0]}-{numbers[-1]}"


def auto_mesh(mesh: Mesh) -> Mesh:
    """`mesh` with Auto axes: XLA decides the sharding of what is not constrained."""
    return Mesh(mesh.devices, mesh.axis_names)


def _global_mesh(
    sizes: Sequence[int] | None,
    names: Sequence[str] | None,
    devices: np.ndarray | Sequence[jax.Device] | None,
) -> Mesh:
    given = None if devices is None else np.asarray(devices, dtype=object)
    if sizes is None and given is not None:
        sizes = given.shape
    if names is None or sizes is None:
        raise ValueError(
            "a MultiMesh needs axis_sizes= and axis_names=, or devices= and axis_names=, or global_mesh="
        )
    sizes, names = _whole_sizes("MultiMesh", sizes), tuple(names)
    _check_axes("MultiMesh", sizes, names)
    needed = math.prod(sizes)
    if given is None:
        available = jax.devices()
        if len(available) < needed:
            raise ValueError(
                f"too few devices for a MultiMesh of {_sizes(sizes, names)}: it needs {needed}, and JAX has "
                f'{len(available)} (on CPU, jax.config.update("jax_num_cpu_devices", {needed}) '
                "makes more, before anything else asks JAX for devices)"
            )
        flat = available[:needed]
    else:
        flat = list(given.flat)
        if len(flat) != needed:
            raise ValueError(
                f"a MultiMesh of {_sizes(sizes, names)} needs {needed} devices, and devices= has {len(flat)}"
            )
        repeated = sorted({str(device) for device, count in Counter(flat).items() if count > 1})
        if repeated:
            raise ValueError(f"devices= of a MultiMesh repeats {', '.join(repeated)}")
    return Mesh(_array(flat, sizes), names)


def _device_numbers(devices: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(map(operator.index, devices))
    except TypeError:
        raise TypeError(
            f"devices= of a TaskMesh is a flat list of device numbers (0 is the program's first device), "
            f"not {devices!r}"
        ) from None
    if not numbers:
        raise ValueError("a TaskMesh needs at least one device")
    overlapping = sorted(n for n, count in Counter(numbers).items() if count > 1)
    if overlapping:
        raise ValueError(f"overlapping devices in a TaskMesh: {overlapping} each appear more than once")
    if min(numbers) < 0:
        raise ValueError(f"device numbers of a TaskMesh start at 0, not {min(numbers)}")
    return numbers


def _whole_sizes(kind: str, sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"axis_sizes= of a {kind} is a whole number for each axis, not {sizes!r}") from None


def _check_axes(kind: str, sizes: Sequence[int], names: Sequence[str]) -> None:
    if len(sizes) != len(names):
        raise ValueError(
            f"a {kind} names each axis once: {len(sizes)} sizes {tuple(sizes)} and "
            f"{len(names)} names {tuple(names)} differ in length"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"axis names of a {kind} must differ, not {tuple(names)}")
    if unprintable := [name for name in names if isinstance(name, str) and not name.isprintable()]:
        raise ValueError(f"axis names of a {kind} are of printable characters, and {unprintable} have others")
    if any(size < 1 for size in sizes):
        raise ValueError(f"axis sizes of a {kind} are at least 1, not {tuple(sizes)}")


def _array(devices: list[jax.Device], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(tuple(shape))


def _sizes(sizes: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def _axes(mesh: Mesh) -> str:
    return _sizes(mesh.axis_sizes, mesh.axis_names)
