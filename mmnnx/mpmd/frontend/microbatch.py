"""`mm.microbatch`: a function over a batch becomes a loop over slices of it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from mmnnx.mpmd.frontend.custom_schedule import parse_rows
from mmnnx.mpmd.frontend.microbatch_loop import run_loop
from mmnnx.mpmd.frontend.reductions import check_names
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.schedule import get_schedule, schedule_names
from mmnnx.sharding.task import check_remat

P = ParamSpec("P")
R = TypeVar("R")


def microbatch(
    fun: Callable[P, R],
    dim: int,
    size: int | None = None,
    argnum: int = 0,
    *,
    count: int | None = None,
    schedule: str | None = None,
    num_stages: int | None = None,
    interleave: int | None = None,
    unrolling: int | None = None,
    per_call: int | Literal["auto"] | None = None,
    arg_shardings: Any = None,
    custom_schedule: Sequence[Sequence[Any]] | None = None,
    reduce: Any = "sum",
    remat: Any = None,
    memory_limit: float | None = None,
) -> Callable[P, R]:
    """Runs `fun` over slices of one argument and reduces the results.

    Inside `mm.jit` the loop is a pipeline over the TaskMeshes its body touches, in the order of `schedule`.
    Elsewhere it is an ordinary loop with the same result. State that `fun` updates (BatchNorm statistics,
    RNG counters) is carried from one microbatch to the next.

    Args:
      fun: a pure function or one over NNX objects, such as `nnx.value_and_grad(loss_fn)`.
      dim: the dimension to slice, the same for every leaf of the sliced argument.
      size, count: the size of a microbatch along `dim`, or the number of microbatches: one of the two. It
        must divide the size of the batch along `dim`.
      argnum: which positional argument to slice, a pytree of arrays. The others are constant over the loop.
      schedule: the name of a schedule ("gpipe", "1f1b", "zero-bubble-h1", ...; `mmnnx schedule` lists them),
        or "custom". Default: of those of mmnnx that can be used here (and fit `memory_limit`), the one with
        the lowest step latency in simulation, of times that are estimated from shapes.
      num_stages: number of pipeline stages expected; checked against what is found.
      interleave: number of stages on each TaskMesh expected, for schedules that interleave them.
      unrolling: for "interleaved-1f1b" and "interleaved-zero-bubble", how many microbatches a mesh runs of
        one of its stages before it turns to its next. Default: the number of meshes.
      per_call: how many microbatches a stage runs in one call, one after the other, as if they were one: the
        host starts fewer calls and transfers, but a stage waits for that many, and saves the activations of
        that many more. It must divide their number. "auto" is what takes the least time in simulation, by
        what shapes tell of the work: above 1 only where it is the host that stages wait for. Default: "auto"
        where no schedule is named, else 1.
      arg_shardings: PartitionSpec, or a prefix tree of them, for each slice of the argument.
      custom_schedule: the order of work itself, in rows, each of them on one TaskMesh: of task names (the
        k-th time a name appears is microbatch k), of (microbatch, task name) pairs, or of `mm.Action`. A task
        that is trained has several names: "stage0 forward", "stage0 backward". What no row names follows by
        dependency.
      reduce: "sum" (default; of booleans it is "or"), "mean", "max", "last" or "concat" (along `dim`; scalars
        become a vector of one entry per microbatch), or a prefix tree of these over the results. Sums and
        means of narrow floats are kept in float32 over the loop; means of integers and booleans are float32.
      remat: what the backward of a stage may compute again rather than keep: None for what is cheap, True for
        everything, or a policy of `jax.checkpoint`; or a sequence of one of these for each stage.
      memory_limit: bytes of live arrays that one TaskMesh may hold at a time, by `Program.simulate`.

    Returns:
      A function with the signature of `fun`.

    Raises:
      ValueError: for a size or count that does not divide the batch, both or neither of them, leaves that
        disagree on the batch size, a leaf without dimension `dim`, an NNX object to slice, an unknown
        schedule or reduction, an option that the schedule does not have; and when the loop is partitioned,
        for a schedule that is not for such stages or does not fit the memory.

    Example:
      >>> grad_fn = nnx.value_and_grad(loss_fn)
      >>> in_parts = microbatch(grad_fn, dim=0, size=4, argnum=1, schedule="1f1b", reduce="mean")
      >>> loss, grads = mm.jit(lambda model, batch: in_parts(model, batch), mesh=mesh)(model, batch)

    The arguments are those of `multimesh.jax.microbatch`, with `reduce`, `count`, `remat`,
    `memory_limit` and `per_call` added.
    """
    if not callable(fun):
        raise TypeError(f"microbatch: fun is a function, not {fun!r}")
    given = {"interleave": interleave, "unrolling": unrolling}
    options = {name: _whole(n, name, "a positive int", 1) for name, n in given.items() if n is not None}
    rows = parse_rows(schedule, custom_schedule)
    _check_options(schedule, options, rows)
    check_names(reduce)
    one = "the number of one argument (a tuple or a dict can be: fun = lambda model, batch: f(model, *batch))"
    dim, argnum = _whole(dim, "dim", "an int"), _whole(argnum, "argnum", one, 0)
    if (size is None) == (count is None):
        given_both = "neither" if size is None else f"size={size} and count={count}"
        raise ValueError(
            f"microbatch: give size=, the size of a microbatch along dimension {dim}, or count=, the number "
            f"of microbatches; this has {given_both}"
        )
    if size is not None:
        size = _whole(size, "size", "a positive int", 1)
    if count is not None:
        count = _whole(count, "count", "a positive int", 1)
    if per_call is None:
        per_call = "auto" if schedule is None and not rows else 1
    if per_call != "auto":
        per_call = _whole(per_call, "per_call", 'a positive int or "auto"', 1)
    if rows and per_call != 1:
        raise ValueError(f"microbatch: per_call={per_call!r} means nothing to a custom schedule")
    if num_stages is not None:
        num_stages = _whole(num_stages, "num_stages", "a positive int", 1)
    if memory_limit is not None:
        if isinstance(memory_limit, float) and memory_limit.is_integer():
            memory_limit = int(memory_limit)  # as of 16e9
        memory_limit = _whole(memory_limit, "memory_limit", "a number of bytes", 1)
    for each in remat if isinstance(remat, (list, tuple)) else (remat,):
        check_remat(each, "microbatch: remat=")
    spec = LoopSpec(
        None if rows else schedule,
        tuple(options.items()),
        rows,
        num_stages,
        tuple(remat) if isinstance(remat, (list, tuple)) else remat,
        memory_limit,
        per_call=None if per_call == "auto" else per_call,
    )

    @functools.wraps(fun)
    def loop(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_loop(
            fun,
            args,
            kwargs,
            argnum=argnum,
            dim=dim,
            size=size,
            count=count,
            arg_shardings=arg_shardings,
            reduce=reduce,
            spec=spec,
        )

    return loop


def _whole(value: Any, name: str, what: str, least: float = -math.inf) -> int:
    """A whole number, of Python or NumPy.

    Raises:
      ValueError: says what it has to be.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"microbatch: {name} must be {what}, got {value!r}")
    return number


def _check_options(schedule: str | None, options: dict[str, int], rows: Sequence[Any]) -> None:
    """Options must be of a schedule that has them."""
    if schedule not in (None, "custom"):
        known = get_schedule(schedule).options  # an unknown name fails here, not in the first step
        for name in options.keys() - set(known):
            others = [other for other in schedule_names() if name in get_schedule(other).options]
            raise ValueError(
                f"microbatch: {name}={options[name]} means nothing to schedule {schedule!r}; it is for "
                f"{', '.join(map(repr, others))}"
            )
    elif rows and options:
        raise ValueError(
            f"microbatch: {', '.join(options)} means nothing to a custom schedule, which says all"
        )
