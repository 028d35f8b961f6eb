"""What does the host do for a call of `mm.jit`, beside the compiled calls and copies that it is made of?

Two tables of CPU time of the calling thread, four stages of one device each:

- a training step over microbatches, for stages of few and of many arrays: the sum of the bare compiled calls
  and copies in it; the same written out, a line of Python for each, which also drops the arrays that it has
  used; the program that dispatches them; and the whole call, which takes the NNX state apart too;
- a model of many small Variables: the call under `mm.jit` and under `nnx.jit`, with and without what the
  compiled calls take.

python benchmarks/host.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.runtime import prepare
from mmnnx.mpmd.runtime import steps as program_steps

STAGES = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """Time what the host does for a call, beside compiled calls and copies."""

    arrays: tuple[int, ...] = (10, 300)
    """Arrays in a stage of the training step."""
    microbatches: int = 16
    """Of the training step."""
    variables: int = 2000
    """Variables of the model of many."""
    calls: int = 60
    """Timed calls of each kind; the least time counts."""


class Pile(nnx.Module):
    """Stages of many vectors, each of which is multiplied with or added to what passes."""

    def __init__(self, each: int):
        self.stages = nnx.List(
            [nnx.List([nnx.Param(jnp.ones(4)) for _ in range(each)]) for _ in range(STAGES)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in self.stages:
            for n, p in enumerate(stage):
                x = x + p[...] if n % 8 else x * p[...]
        return x


class Watch:
    """The CPU time that compiled calls and copies take by themselves, in functions that are compiled inside
    `watching`.

    Attributes:
      least: the least milliseconds that those of one call take.
      count: how many they are.
    """

    def __init__(self) -> None:
        self.least, self.count, self.nanoseconds = float("inf"), 0, 0
        empty = [time.thread_time_ns() - time.thread_time_ns() for _ in range(1000)]
        self.clock = -max(empty)  # what reading it takes

    def begin(self) -> None:
        self.nanoseconds = self.count = 0

    def end(self, counts: bool) -> None:
        if counts:
            self.least = min(self.least, self.nanoseconds / 1e6)

    def timed(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time_ns()
            out = fun(*args)
            self.nanoseconds += time.thread_time_ns() - start - self.clock
            self.count += 1
            return out

        return call

    @contextlib.contextmanager
    def watching_program(self, runner: Callable[..., Any] = prepare.runner) -> Iterator[None]:
        """As `watching`, of the whole program that dispatches them, made by `runner`."""
        before, prepare.runner = prepare.runner, lambda *args: self.timed(runner(*args))
        try:
            yield
        finally:
            prepare.runner = before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        compile_program, sender = prepare.compile_program, program_steps.sender

        def watched(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_program(*args, **kwargs)
            executables = {}
            for f, e in compiled.executables.items():
                executables[f] = dataclasses.replace(e, call=cast(Any, self.timed(e.call)))
            return dataclasses.replace(compiled, executables=executables)

        prepare.compile_program = watched
        program_steps.sender = lambda *args: self.timed(sender(*args))
        try:
            yield
        finally:
            prepare.compile_program, program_steps.sender = compile_program, sender


def least(calls: int, *functions: Callable[[], Any], watches: Sequence[Watch]) -> list[float]:
    """The least CPU milliseconds of this thread in a call of each, taken in turn after two of each."""
    found: list[list[float]] = [[] for _ in functions]
    for n in range(calls + 2):
        for watch in watches:
            watch.begin()
        for times, fun in zip(found, functions):
            start = time.thread_time_ns()
            out = fun()
            times.append((time.thread_time_ns() - start) / 1e6)
            jax.block_until_ready(out)
        for watch in watches:
            watch.end(counts=n >= 2)
    return [min(times[2:]) for times in found]


def on_stages(each: int) -> tuple[mm.MultiMesh, Pile]:
    mesh = mm.MultiMesh(axis_sizes=(STAGES,), axis_names=("stage",), devices=jax.devices()[:STAGES])
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(STAGES)]
    placement = mm.TaskSharding({mm.path("stages", n): (task, None) for n, task in enumerate(tasks)})
    with mesh:
        return mesh, mm.jit(lambda: Pile(each), out_shardings=placement)()


def written_out(compiled: Compiled, *_: Any) -> Callable[[list[jax.Array]], Sequence[jax.Array]]:
    """In the place of mmnnx's loop: a function with a line for each call and copy, and for what it frees."""
    program, functions = compiled.program, {}
    outputs = [*itertools.chain.from_iterable(program.outputs)]
    lasting = program.moved({*program.inputs, *outputs})
    lines = [f"{names(program.inputs)} = arrays", "arrays.clear()"]
    for n, group in enumerate(program_steps.group_transfers(program.instructions)):
        step = program_steps.make_step(compiled, group, lasting)
        functions[f"f{n}"] = step.execute
        lines.append(f"{names(step.outputs)} = f{n}({names(step.inputs)})")
        if step.frees:
            lines.append(f"del {names(step.frees)}")
    lines.append(f"return {names(outputs)}")
    exec("def run(arrays):\n    " + "\n    ".join(lines), functions)
    return functions["run"]


def names(buffers: Iterable[int]) -> str:
    return "".join(f"v{b}, " for b in buffers)


def steps(each: int, options: Options) -> str:
    """One line of the first table."""
    mesh, model = on_stages(each)
    batch = np.ones((options.microbatches, 4), np.float32)
    bare, by_hand, dispatch = Watch(), Watch(), Watch()

    def step(model: Pile, batch: Any) -> jax.Array:
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
        loss, grads = mm.microbatch(grad_fn, dim=0, size=1, argnum=1, schedule="1f1b")(model, batch)
        nnx.update(model, jax.tree.map(lambda p, g: p - 1e-6 * g, nnx.state(model), grads))
        return loss

    plain, lines, program, watched = (mm.jit(step, donate_argnums=0, mesh=mesh) for _ in range(4))
    with by_hand.watching_program(written_out):
        lines(model, batch)
    with dispatch.watching_program():
        program(model, batch)
    with bare.watching():
        watched(model, batch)
    calls = [functools.partial(fun, model, batch) for fun in (plain, lines, program, watched)]
    total, *_ = least(options.calls, *calls, watches=(bare, by_hand, dispatch))
    alone = by_hand.least
    return (
        f"{each:15}{bare.count:15}{bare.least:9.2f} ms{1e3 * bare.least / bare.count:9.1f} us{alone:12.2f} ms"
        f"{dispatch.least:9.2f} ms{dispatch.least / alone:8.2f}{total:9.2f} ms{total / alone:8.2f}"
    )


def read(model: Pile, x: Any) -> jax.Array:
    return model(x)


def write(model: Pile, x: Any) -> jax.Array:
    nnx.update(model, jax.tree.map(lambda p: p * 1.0001, nnx.state(model)))
    return model(x)


def many_variables(fun: Callable[..., Any], options: Options) -> str:
    """One line of the second table."""
    mesh, model = on_stages(options.variables // STAGES)
    whole = Pile(options.variables // STAGES)
    x, bare = np.ones(4, np.float32), Watch()
    plain, watched = (mm.jit(fun, mesh=mesh) for _ in range(2))
    with bare.watching():
        watched(model, x)
    one = nnx.jit(fun)
    graphdef, state = nnx.split(whole)
    leaves, tree = jax.tree.flatten(state)

    @jax.jit
    def flat(leaves: list[jax.Array], x: Any) -> Any:
        model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
        return fun(model, x), jax.tree.leaves(nnx.state(model))

    of_flat, of_one, of_ours, _ = least(
        options.calls,
        lambda: flat(leaves, x),
        lambda: one(whole, x),
        lambda: plain(model, x),
        lambda: watched(model, x),
        watches=[bare],
    )
    states = of_one - of_flat, of_ours - bare.least
    return (
        f"{fun.__name__:8}{of_one:9.2f} ms{of_flat:9.2f} ms{states[0]:9.2f} ms"
        f"{of_ours:9.2f} ms{bare.least:9.2f} ms{states[1]:9.2f} ms{states[1] / states[0]:8.2f}"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    print(f"jax {jax.__version__}; CPU time of the calling thread, the least of {options.calls} calls")
    print(
        f"a training step, {STAGES} stages, {options.microbatches} microbatches\n"
        f"{'arrays a stage':>15}{'calls, copies':>15}{'bare':>12}{'each':>12}{'written out':>15}"
        f"{'dispatch':>12}{'ratio':>8}{'mm.jit':>12}{'ratio':>8}"
    )
    for each in options.arrays:
        print(steps(each, options), flush=True)
    print(
        f"\na model of {options.variables} Variables\n"
        f"{'':8}{'nnx.jit':>12}{'bare':>12}{'NNX state':>12}"
        f"{'mm.jit':>12}{'bare':>12}{'NNX state':>12}{'ratio':>8}"
    )
    for fun in (read, write):
        print(many_variables(fun, options), flush=True)


if __name__ == "__main__":
    main()
