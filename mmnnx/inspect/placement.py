"""``mm.show_placement``: which submesh holds what, and how full its devices are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from flax import nnx

from mmnnx.inspect.figure_bytes import check_picture_suffix, picture_bundle, picture_bytes
from mmnnx.inspect.locations import Home, Homes, sort_homes
from mmnnx.inspect.model_state import Piece, list_state, on_devices
from mmnnx.inspect.placement_picture import draw_placement
from mmnnx.inspect.step_memory import StepMemory, add_step
from mmnnx.inspect.submesh import Part, Submesh
from mmnnx.inspect.units import bytes_text, ranges_text
from mmnnx.printable import printable
from mmnnx.sharding.mesh import MultiMesh, current_multimesh, idle_text, program_devices
from mmnnx.sharding.placement import TaskSharding

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NowhereError(ValueError):
    """No array of a model lives anywhere."""


@dataclass(frozen=True)
class PlacementView:
    """A picture that shows itself in a notebook; `str()` is a compact text.

    Attributes:
      names: what the models are called.
      submeshes: the boxes.
      memory: bytes that a device has, if known.
      unplaced: bytes of arrays that are not placed.
      idle: numbers of the devices that the MultiMesh leaves idle.
      dark: whether the picture is for dark paper.

    Example:
      >>> view = mm.show_placement(model)
      >>> len(view.submeshes), view.unplaced
      (4, 0)
    """

    names: tuple[str, ...]
    submeshes: tuple[Submesh, ...]
    memory: int | None
    unplaced: int
    idle: tuple[int, ...] = ()
    dark: bool = False

    @property
    def title(self) -> str:
        """The models, the number of devices, and the bytes of the fullest: their peak in a step where that is
        known, else those of state."""
        most = max(submesh.peak for submesh in self.submeshes)
        devices = len({device for submesh in self.submeshes for device in submesh.devices})
        text = f"{' and '.join(self.names)} on {devices} device{'s' * (devices > 1)}"
        what = "peak" if any(submesh.step for submesh in self.submeshes) else "state"
        text += f", {what} per device {bytes_text(most)}" if devices > 1 else f", {what} {bytes_text(most)}"
        if self.memory is not None:
            text += f" of {bytes_text(self.memory)}"
        return text + (f"; {bytes_text(self.unplaced)} not placed" if self.unplaced else "")

    @functools.cached_property
    def figure(self) -> Figure:
        """The picture: a card for each submesh with its devices, what they hold, and a bar of their memory.

        The whole bar is the memory of a device or the peak over all devices, whichever is larger. It is red
        where that does not fit.
        """
        return draw_placement(self.title, self.submeshes, self.memory, self.dark)

    def save(self, path: str | FilePath) -> None:
        """Writes the picture (.svg, .png or .pdf).

        Raises:
          ValueError: for a path that ends otherwise.
        """
        suffix = check_picture_suffix(path)
        FilePath(path).write_bytes(picture_bytes(self.figure, suffix))

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> Any:
        return picture_bundle(self.figure, str(self))

    def __str__(self) -> str:
        names = max(len(submesh.name) for submesh in self.submeshes)
        lines = [self.title]
        for submesh in self.submeshes:
            named = submesh.name != submesh.device_text
            head = f"{submesh.name:{names}}  {submesh.device_text if named else ''}".rstrip()
            head += f" ({submesh.axes})" if submesh.axes else ""
            lines.append(f"{head}: {submesh.memory_text(self.memory)}")
            shown = (*submesh.main_parts(), *submesh.step)
            parts = ", ".join(f"{part.name} {bytes_text(part.bytes)}" for part in shown)
            lines += [f"{'':{names}}  {parts}"] if parts else []
        lines += [idle_text(self.idle)] if self.idle else []
        return "\n".join(lines)

    __repr__ = __str__  # what a terminal shows


def show_placement(
    *models: Any,
    sharding: TaskSharding | None = None,
    memory: float | None = None,
    mesh: MultiMesh | None = None,
    plan: StepMemory | None = None,
    dark: bool = False,
) -> PlacementView:
    """A picture of where state lives: submeshes, their devices, what these hold, and how full they are.

    Nothing is computed. Bytes are those of the state between steps; with `plan=` also what a step adds at its
    worst moment: gradients, activations, temporaries.

    Args:
      *models: NNX objects, such as a model and its optimizer, real or of `nnx.eval_shape`.
      sharding: a TaskSharding that says where state is going to live, for models that are not placed yet.
        Optimizer state follows its parameters. Default: the arrays' own shardings.
      memory: bytes that one device has. Default: what the plan knows of its devices.
      mesh: the MultiMesh whose slices and tasks name the submeshes, and whose free devices are shown.
        Default: the current MultiMesh, if there is one.
      plan: of a step that has these models among its arguments, as `mm.plan` makes it.
      dark: draws for dark paper.

    Returns:
      A `PlacementView`, which a notebook shows; it has `figure` and `save(path)`.

    Raises:
      TypeError: something that is no NNX object, TaskSharding or MultiMesh.
      ValueError: no models, models whose arrays live nowhere, or memory that is not above 0.
      PlacementError: state that `sharding` cannot place, or a filter of it that places nothing.

    Example:
      >>> mm.show_placement(model, optimizer, memory=16e9).save("placement.svg")
      >>> view = mm.show_placement(model, optimizer, plan=mm.plan(train_step, model, optimizer, batch))
    """
    if not models:
        raise ValueError("show_placement needs a model: mm.show_placement(model, optimizer)")
    if isinstance(models[-1], TaskSharding):
        raise TypeError("a TaskSharding is not a model: give it as sharding=")
    if memory is not None and (isinstance(memory, str) or not memory > 0):
        raise ValueError(f"memory= is the bytes that one device has, not {memory!r}")
    if not isinstance(mesh, MultiMesh | None):
        raise TypeError(f"mesh= is a MultiMesh, not {mesh!r}")
    if memory is None and plan is not None and plan.chip is not None:
        memory = plan.chip.memory
    names = _names(models)
    with mesh if mesh is not None else contextlib.nullcontext():
        multimesh, homes = current_multimesh(), Homes(sharding)
        named = [
            (f"{name}: " * (len(names) > 1), model, piece)
            for name, model in zip(names, models)
            for piece in list_state(model, homes).pieces
        ]
        homes.check_used()
        numbers = {device: n for n, device in enumerate(program_devices())}
    found = [
        (name, model, share)
        for name, model, piece in named
        for share in piece.shares
        if share.placed is not None
    ]
    if not found:
        help = "give sharding= to see where they would live" if named else "there is none"
        raise NowhereError(f"no array of {' and '.join(names)} is on a device: {help}")
    submeshes = _in_one_order(_submeshes(found, multimesh))
    return PlacementView(
        tuple(names),
        tuple(submeshes if plan is None else (add_step(box, plan, numbers) for box in submeshes)),
        None if memory is None else int(memory),
        sum(piece.bytes for _, _, piece in named if piece.placed is None),
        () if multimesh is None else multimesh.idle,
        dark,
    )


def _submeshes(found: Sequence[tuple[str, Any, Piece]], multimesh: MultiMesh | None) -> Iterable[Submesh]:
    """A box for each set of devices that state lives on, except sets that contain others."""
    held = on_devices(piece for _, _, piece in found)
    narrow, wide = sort_homes(piece.placed.home for _, _, piece in found if piece.placed is not None)
    boxes: dict[tuple[int, ...], list[Home]] = {}
    for home in narrow:
        boxes.setdefault(home.devices, []).append(home)
    left = sorted(set(held).difference(*boxes))
    for home in sorted(wide, key=lambda home: len(home.devices)):  # devices that have no smaller home
        mine = tuple(device for device in left if device in home.devices)
        left = [device for device in left if device not in home.devices]
        if mine:
            boxes[mine] = [dataclasses.replace(home, axes="")]
    for devices, homes in boxes.items():
        tasks = [home.task for home in homes if home.task != "all"] or ["all"]
        name = ", ".join(dict.fromkeys(tasks))
        yield Submesh(name, homes[0].axes, devices, _parts(found, devices), {d: held[d] for d in devices})
    free = () if multimesh is None else tuple(n for n in range(multimesh.mesh.size) if n not in held)
    if free:
        yield Submesh("free", "", free, (), {})


def _in_one_order(boxes: Iterable[Submesh]) -> list[Submesh]:
    """Weights before optimizer state, and groups by their bytes on all devices, in each box the same."""
    boxes, total = list(boxes), Counter[str]()
    for box in boxes:
        for part in box.parts:
            total[part.group] += part.bytes * len(box.devices)
    order = lambda part: (part.kind != "weights", -total[part.group], part.name)
    return [dataclasses.replace(box, parts=tuple(sorted(box.parts, key=order))) for box in boxes]


def _parts(found: Sequence[tuple[str, Any, Piece]], devices: tuple[int, ...]) -> tuple[Part, ...]:
    """The parts of models on these devices."""
    groups: dict[str, tuple[str, set[int], list[Piece]]] = {}
    for name, model, piece in found:
        if piece.placed is None or set(devices).isdisjoint(piece.placed.home.devices):
            continue
        kind, part, index = _part(model, piece)
        _, indices, pieces = groups.setdefault(name + part, (kind, set(), []))
        indices.update(() if index is None else (index,))
        pieces.append(piece)
    parts = []
    for name, (kind, indices, pieces) in groups.items():
        most = max(size for device, size in on_devices(pieces).items() if device in devices)
        parts.append(Part(f"{name}.{ranges_text(indices)}" if indices else name, most, name, kind))
    return tuple(parts)


def _part(model: Any, piece: Piece) -> tuple[str, str, int | None]:
    """The kind of an array, the top-level part of the model that it is in, and its index there, in a list."""
    path, optimizer = piece.path, isinstance(model, nnx.Optimizer)
    kind = "optimizer state" if optimizer else "weights"
    if optimizer and path[0] == "opt_state":
        return kind, printable(next((key for key in path[1:] if isinstance(key, str)), "opt_state")), None
    return kind, printable(str(path[0])), path[1] if len(path) > 1 and isinstance(path[1], int) else None


def _names(models: Sequence[Any]) -> list[str]:
    """The classes of models, numbered if a class occurs more than once."""
    names = [printable(type(model).__name__) for model in models]
    seen: dict[str, int] = {}
    for n, name in enumerate(names):
        if names.count(name) > 1 or name in seen:
            seen[name] = seen.get(name, 0) + 1
            names[n] = f"{name} {seen[name]}"
    return names
