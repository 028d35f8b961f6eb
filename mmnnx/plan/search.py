"""Which division of a machine is best: all are estimated, the best few are compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from mmnnx.inspect.units import bytes_text, time_text
from mmnnx.mpmd.schedule import schedule_names
from mmnnx.plan.estimate import Estimate, estimate
from mmnnx.plan.language_models import TrainingJob
from mmnnx.plan.planning import Plan

ROWS = (1, 2, 4, 8)
SEARCHED = ("stages", "tensor", "data", "rows", "schedule", "remat")


@dataclasses.dataclass(frozen=True)
class Tried:
    """A job that was estimated, and what its compilers said.

    Attributes:
      estimate: the formulas' figures.
      plan: the compilers'; None if the job is none that can be compiled.
      error: then why.
    """

    estimate: Estimate
    plan: Plan | None
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits is True


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
      estimates: of all jobs that fit, the fastest first.
      refused: how many jobs there were beside, by why they are not among these.
      compiled: the best few, the fastest that fits first.
    """

    estimates: tuple[Estimate, ...]
    refused: Mapping[str, int]
    compiled: tuple[Tried, ...] = ()

    @property
    def best(self) -> tuple[TrainingJob, Plan] | None:
        """The compiled job that is fastest of those that fit, and its plan."""
        first = self.compiled[0] if self.compiled else None
        if first is None or first.plan is None or not first.fits:
            return None
        return first.estimate.job, first.plan

    def __rich__(self) -> RenderableType:
        return report(self)


def search(job: TrainingJob, fixed: Collection[str] = (), compile_best: int = 3) -> Search:
    """Ranks stages x tensor x data x microbatch x schedule x remat for a job, and compiles the best few.

    Its context and expert stay, and the other devices are divided.
    Of each division of the machine into stages, tensor and data the best alone is compiled. Where none of
    them fits, up to twice as many are.

    Args:
      job: the model, the machine, the batch; what is searched is replaced in it.
      fixed: names of fields of `SEARCHED` that stay as they are.
      compile_best: how many to compile.

    Raises:
      ValueError: if context x expert do not divide the machine.
    """
    devices, rest = divmod(len(job.devices()), job.context * job.expert)
    if rest:
        raise ValueError(
            f"{job.target} has {len(job.devices())} devices, which {job.context} along context x "
            f"{job.expert} along expert do not divide"
        )
    found: list[Estimate] = []
    refused: Counter[str] = Counter()
    for changes in _divisions(job, devices, fixed):
        try:
            one = estimate(dataclasses.replace(job, **changes))
        except ValueError:
            refused["sizes that do not go together"] += 1
            continue
        if one.fits:
            found.append(one)
        else:
            refused["more memory than a device has"] += 1
    found.sort(key=lambda e: (e.seconds, e.memory))
    compiled: list[Tried] = []
    for n, e in enumerate(_one_of_each(found)):
        if n >= 2 * compile_best or (n >= compile_best and any(c.fits for c in compiled)):
            break
        compiled.append(_compiled(e))
    compiled.sort(key=_rank)
    return Search(tuple(found), refused, tuple(compiled))


def _divisions(job: TrainingJob, devices: int, fixed: Collection[str]) -> Iterator[dict[str, Any]]:
    config = job.config
    choices: dict[str, Sequence[Any]] = {
        "stages": _divisors(devices),
        "tensor": [n for n in _divisors(devices) if config.kv_heads % n == 0],
        "rows": ROWS,
        "schedule": [name for name in schedule_names() if name not in ("sequential", "wavefront")],
        "remat": (False, True),
    }
    choices |= {name: [getattr(job, name)] for name in fixed}
    for stages in choices["stages"]:
        for tensor in choices["tensor"]:
            data, rest = divmod(devices, stages * tensor)
            if rest or ("data" in fixed and data != job.data) or stages > config.layers:
                continue
            for rows in choices["rows"]:
                for remat in choices["remat"]:
                    # One stage has no order to choose.
                    for schedule in choices["schedule"] if stages > 1 else choices["schedule"][:1]:
                        yield dict(
                            stages=stages, tensor=tensor, data=data, rows=rows, remat=remat, schedule=schedule
                        )


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _one_of_each(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The first of each division into stages, tensor and data."""
    first: dict[tuple[int, int, int], Estimate] = {}
    for e in estimates:
        first.setdefault((e.job.stages, e.job.tensor, e.job.data), e)
    return list(first.values())


def _compiled(e: Estimate) -> Tried:
    try:
        return Tried(e, e.job.plan())
    except (ValueError, RuntimeError) as error:
        return Tried(e, None, (str(error).splitlines() or [type(error).__name__])[0])


def _rank(found: Tried) -> tuple[bool, float]:
    plan = found.plan
    if plan is None or plan.seconds is None:
        return True, found.estimate.seconds
    return not plan.fits, plan.seconds


def report(found: Search) -> RenderableType:
    """The table of a search, and why the first is first."""
    table = Table(
        title="compiled, then the best that only formulas know", title_justify="left", box=box.SIMPLE_HEAD
    )
    for heading in ("stages x tensor x data", "rows", "schedule", "remat"):
        table.add_column(heading, overflow="fold")
    for heading in ("estimate", "computing", "sending", "idle", "once", "memory", "compiled", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = {id(c.estimate) for c in found.compiled}
    for c in found.compiled:
        table.add_row(*_cells(c.estimate), *_found(c))
    for e in [e for e in _one_of_each(found.estimates) if id(e) not in shown][:5]:
        table.add_row(*_cells(e), "-", "-")
    tried = len(found.estimates) + sum(found.refused.values())
    reasons = "; ".join(f"{n:,} with {why}" for why, n in found.refused.items())
    lines: list[RenderableType] = [
        f"{tried:,} plans; left out: {reasons or 'none'}",
        "",
        *([table] if table.rows else []),
    ]
    return Group(*lines, *_why(found))


def _cells(e: Estimate) -> list[str]:
    job = e.job
    sizes = [f"{job.stages} x {job.tensor} x {job.data}", str(job.rows)]
    times = [time_text(t) for t in (e.seconds, e.computing, e.sending, e.idle, e.once)]
    return [*sizes, job.schedule, "yes" if job.remat else "no", *times, bytes_text(round(e.memory))]


def _found(c: Tried) -> tuple[str, str]:
    if c.plan is None:
        return "not possible", "-"
    if c.plan.seconds is None:
        return "does not fit", "-"
    most = bytes_text(max(m.total for m in c.plan.memory))
    return time_text(c.plan.seconds), most if c.plan.fits else f"{most}: too much"


def _why(found: Search) -> list[str]:
    """Why the best is best: what the others lose most time with."""
    lines = [f"not possible, {_name(c.estimate.job)}: {c.error}" for c in found.compiled if c.plan is None]
    if found.best is None:
        return [*lines, "None that was compiled fits." if found.compiled else "No plan fits."]
    best = found.compiled[0].estimate
    lines.append(f"Best: {_name(best.job)}.")
    for c in found.compiled[1:]:
        if c.plan is not None and c.plan.seconds is not None:
            more = found.best[1].seconds or 0.0
            what = f"{time_text(c.plan.seconds - more)} more" if c.fits else "more memory than there is"
            lines.append(f"{_name(c.estimate.job)}: compiled, {what}.")
    known = {id(c.estimate) for c in found.compiled}
    for e in [e for e in _one_of_each(found.estimates) if id(e) not in known][:4]:
        parts = ("computing", "sending", "idle", "once")
        loses = {name: getattr(e, name) - getattr(best, name) for name in parts}
        worst = max(loses, key=loses.__getitem__)
        if loses[worst] > 0:
            what = "for what is done once a step" if worst == "once" else worst
            lines.append(f"{_name(e.job)}: {time_text(loses[worst])} more {what}.")
    return lines


def _name(job: TrainingJob) -> str:
    again = ", remat" if job.remat else ""
    return (
        f"{job.stages} stages x {job.tensor} tensor x {job.data} data, {job.rows} rows, {job.schedule}{again}"
    )
