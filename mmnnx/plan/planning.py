"""`mm.plan` itself: whether a step fits a machine that need not be here, and how long it takes there."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh
from rich.console import Console

from mmnnx import _compat
from mmnnx.inspect.figure_bytes import PICTURES, picture_bytes
from mmnnx.inspect.rich_output import print_table
from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.compile.executables import WHILE_COMPILING
from mmnnx.mpmd.compile.saved_executables import save_executables
from mmnnx.mpmd.ir.flops import largest_results
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import DISPATCH, Costs, Timeline
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.mpmd.jit.lowered import FlatCompiled, FlatLowered
from mmnnx.plan.chips import Chip, chip_of
from mmnnx.plan.collectives import link_domains
from mmnnx.plan.fragments import FragmentCost, fragment_costs
from mmnnx.plan.memory import device_memory, shard_bytes
from mmnnx.plan.picture import draw_plan
from mmnnx.plan.report import as_html, as_text, report, verdict
from mmnnx.plan.step_plan import Overflow, StepPlan

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def plan_suffix(path: Path) -> str:
    """The suffix of a file for a plan, in lower case; raises ValueError for one that there is not."""
    if (suffix := path.suffix.lower()) not in (known := (".json", ".html", ".executables", *PICTURES)):
        raise ValueError(f"{path}: the file name of a plan must end in {', '.join(known)}")
    return suffix


class Plan(StepPlan):
    """A plan that shows itself: text in `str()`, colours in `rich.print`, a picture in a notebook.

    Example:
      >>> found = mm.plan(train_step, model, optimizer, batch)
      >>> found.save("plan.html")  # or .svg, .png, .json, .executables
      >>> found.memory[0].total > 0
      True
    """

    def show(self) -> None:
        """Prints it, as wide as the terminal; wider, if words would be cut."""
        print_table(Console(), report(self))

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file: `.json` the data, `.svg`, `.png` or `.pdf` the picture, `.html` both.

        `.executables` is for `mm.load_executables` on the machine: it has what was compiled, and the machine
        needs the same version of JAX and of its compiler. What calls cuDNN is left out, with a warning,
        unless it was compiled for GPUs that are here. For CPU devices plan without
        `jax_compilation_cache_dir`: what JAX reads from its cache there cannot be kept in a file once more.

        Raises:
          ValueError: for a path that ends otherwise, and for the picture or the executables of a plan with an
            `overflow`.
        """
        path = Path(path)
        suffix = plan_suffix(path)
        if suffix == ".json":
            path.write_text(json.dumps(self.to_json(), indent=2))
        elif suffix == ".html":
            path.write_text(as_html(self))
        elif suffix in (*PICTURES, ".executables") and self.compiled is None:
            what = "picture" if suffix in PICTURES else "executable of all of it"
            raise ValueError(f"{path}: {self.name} does not fit, so there is no {what}: .html has the report")
        elif suffix == ".executables":
            assert self.compiled is not None
            codes = {id(e.code): e.code for e in self.compiled.executables.values()}
            save_executables(((c.key, c.compiled, c.mesh) for c in codes.values()), path)
        else:
            path.write_bytes(picture_bytes(draw_plan(self), suffix))

    def __rich__(self) -> Any:
        return report(self)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Plan({verdict(self)})"

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": str(self)}
        if self.overflow is None:
            bundle["image/png"] = picture_bytes(draw_plan(self), ".png")
        return bundle


def make_plan(f: Jit[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """What `mm.plan` does; see there."""
    if not isinstance(f, Jit):
        raise TypeError(f"mm.plan takes a function that mm.jit made, not {f!r}")
    if jax.process_count() > 1:
        raise ValueError("a step is planned in one process: run the script without mm.initialize")
    lowered = _compat.inner_stage(f.lower(*args, **kwargs)._stage)
    if not isinstance(lowered, FlatLowered):
        raise ValueError(
            f"all of {getattr(f, '__name__', 'this function')} is on one TaskMesh, and runs as one XLA "
            "program: there is nothing to plan. f.lower(...).compile().memory_analysis() has its bytes"
        )
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        overflow = _overflow(error, lowered.program)
        if overflow is None:
            raise _refusal(error) from error
        return _plan(lowered.fun_name, lowered.program, overflow=overflow)
    return _planned(compiled)


def _planned(compiled: FlatCompiled) -> Plan:
    found: Compiled = compiled.prepared.compiled
    bound = compiled.prepared.bound
    costs = fragment_costs(found)
    chip = _chip(found.program)
    memory = device_memory(found, costs, bound)
    timeline = fastest = None
    if chip is not None:
        starting = {
            found.program.labels[f]: DISPATCH + chip.launch * c.operation_count for f, c in costs.items()
        }
        between = dataclasses.replace(_transfer_costs(found, chip), dispatches=starting)
        timeline = _simulated(found.program, {f: c.seconds(chip) for f, c in costs.items()}, between)
        # What is compiled has its loops written out, and does not know their schedules.
        timeline = dataclasses.replace(timeline, schedule=compiled.lowered.program.schedule)
        best = dataclasses.replace(between, latency=0.0, dispatch=0.0, dispatches={})
        fastest = _simulated(found.program, {f: c.fastest(chip) for f, c in costs.items()}, best).period
    return _plan(
        bound.name,
        found.program,
        fragments=list(costs.values()),
        memory=tuple(memory),
        timeline=timeline,
        fastest=fastest,
        compiled=found,
    )


def _plan(name: str, program: Program, fragments: Sequence[FragmentCost] = (), **found: Any) -> Plan:
    unread = [f.name for f in fragments if f.collectives is None and f.alike == f.name]
    notes = list(program.notes)
    if unread:
        notes.append(
            f"jaxlib {jaxlib.__version__} cannot read what the compiler wrote of {', '.join(unread)}: what "
            "they send between devices is not counted. pip install 'mmnnx[tpu]' has one that it can read"
        )
    for f in fragments:
        if f.uncounted_loops and f.alike == f.name:
            loops = ", ".join(f.uncounted_loops)
            notes.append(
                f"{f.name}: the compiler does not say how often its loops run ({loops}). Each counts "
                "once, so the fragment may take longer than its time here"
            )
    devices = {d for mesh in program.names for d in mesh.devices.flat}
    kinds = sorted({d.device_kind for d in devices})
    defaults = dict(memory=(), timeline=None, fastest=None)
    return Plan(
        name=name,
        device_kind=", ".join(kinds),
        devices=len(devices),
        chip=_chip(program),
        fragments=tuple(fragments),
        notes=tuple(notes),
        program=program,
        **(defaults | found),
    )


def _chip(program: Program) -> Chip | None:
    first, *others = (chip_of(d) for mesh in program.names for d in mesh.devices.flat)
    return first if all(chip is first for chip in others) else None


def _simulated(program: Program, seconds: Mapping[Fragment, float], between: Costs) -> Timeline:
    calls = {program.labels[f]: t for f, t in seconds.items()}
    return dataclasses.replace(program.simulate(dataclasses.replace(between, calls=calls)), unit="s")


def _transfer_costs(compiled: Compiled, chip: Chip) -> Costs:
    """The costs of transfers: each device sends its shard to one of the next mesh."""
    program = compiled.program
    whole, each = Counter[tuple[Mesh, Mesh]](), Counter[tuple[Mesh, Mesh]]()
    for t in program.transfers:
        way = t.source_mesh, t.target_mesh
        whole[way] += t.nbytes
        each[way] += shard_bytes(program, compiled, t.outputs[0])
    speeds = {
        f"{program.names[way[0]]} -> {program.names[way[1]]}": _speed(*way, chip) * whole[way] / n
        for way, n in each.items()
        if n
    }
    return Costs({}, chip.latency, dispatch=DISPATCH, bandwidths=speeds)


def _speed(source: Mesh, target: Mesh, chip: Chip) -> float:
    """Bytes a second from a device of one mesh to one of another."""
    if link_domains(source)[0] != link_domains(target)[0]:
        return chip.network
    on_tpu = source.devices.flat[0].platform == "tpu"
    return chip.link / 2 if on_tpu else chip.link  # a TPU's figure has both directions


def _refusal(error: Exception) -> RuntimeError:
    """What to raise where the compiler refuses a fragment."""
    lines = str(error).splitlines()
    raised = [x for line in lines if re.match(r"[\w.]*(Error|Exception): ", x := line.strip())]
    said = raised[-1] if raised else (lines or [type(error).__name__])[0]  # of Python that the compiler runs
    if "limited ICI routing" in said or "Unexpected device_id" in said:
        said += (
            ". It compiles for all devices of such a machine, and for a block of at most half of them: have "
            "the axis of the stages come first in the MultiMesh"
        )
    return RuntimeError(f"the compiler refuses {_fragment_label(error)}: {said}")


def _fragment_label(error: Exception) -> str:
    notes = (note.partition(WHILE_COMPILING)[2] for note in getattr(error, "__notes__", ()))
    return next(filter(None, notes), "a fragment")


def _overflow(error: Exception, program: Program) -> Overflow | None:
    """What the compiler says of a fragment that is too large; None if it says something else."""
    said = str(error)
    sizes = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", said)
    sizes = sizes or re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", said)
    if "RESOURCE_EXHAUSTED" not in said or sizes is None:
        return None
    needed, limit = (int(float(sizes[n]) * _UNITS[sizes[n + 1]]) for n in (1, 3))
    name = _fragment_label(error)
    found = next((f for f, label in program.labels.items() if label == name), None)
    largest = () if found is None else tuple(largest_results(found.jaxpr))
    return Overflow(name, needed, limit, largest, said)
