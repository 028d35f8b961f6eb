"""A program: the ordered list of fragment calls and transfers that one call of a function becomes.

It is data. It can be printed, verified and simulated without running; `mmnnx.mpmd.emit.emit` makes it and
`mmnnx.mpmd.runtime.dispatch` executes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from jax.sharding import Mesh

from mmnnx._shown import Shown
from mmnnx.mpmd.ir.buffers import Pairs, buffer_reuse, saved_activations
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Instruction, ProgramData
from mmnnx.mpmd.ir.printing import describe, program_text
from mmnnx.mpmd.ir.simulate import simulate
from mmnnx.mpmd.ir.timeline import Costs, Profile, Timeline
from mmnnx.mpmd.ir.timetable import Action, Phase
from mmnnx.mpmd.ir.verify import verify
from mmnnx.printable import printable


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program(Shown, ProgramData):
    """The instructions of one call, to be printed, verified, simulated and profiled.

    Attributes:
      run: runs it for arguments and measures; see `profile`.

    Example:
      >>> program = train_step.program(model, optimizer, batch)
      >>> program.verify()
      >>> print(program)
      Program: ... fragments, ... stage0 forward [microbatch 0] ...
    """

    run: Callable[..., Profile] | None = None

    def table(self) -> list[list[Action]]:
        """What each mesh runs of the stages of the microbatch loop, in order: one row for each mesh.

        It can be written as CSV (`mm.write_schedule`), and given to `mm.microbatch` as `custom_schedule`. A
        call of several microbatches is listed as one action for each microbatch.
        """
        in_a_call = {f: loop.per_call for loop in self.loops for alike in loop.fragments for f in alike}
        rows: dict[Mesh, dict[Action, None]] = {}
        for c in self.calls:
            if c.stage is not None and c.microbatch is not None and c.phase != "none":
                row, count = rows.setdefault(c.mesh, {}), in_a_call.get(c.fragment, 1)
                microbatches = range(count * c.microbatch, count * (c.microbatch + 1))
                row.update({Action(c.stage, cast(Phase, c.phase), m): None for m in microbatches})
        return [list(row) for row in rows.values()]

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Runs the program for arguments like those that it was made for, and measures it.

        It is compiled first. Then the step is run twice on copies of its arguments, as it would run, the
        second time against the clock, and once more one instruction at a time, each of which is timed. The
        last run counts: state is updated as by one call of the function.

        Returns:
          The times of every fragment and transfer, for `simulate`, and the time of the step.

        Raises:
          ValueError: for arguments of other shapes or homes than it was made for.

        Example:
          >>> profile = train_step.program(model, optimizer, batch).profile(model, optimizer, batch)
          >>> profile.seconds > 0, profile.timeline.unit
          (True, 's')
        """
        if self.run is None:
            raise ValueError("this program is a description only: profile one that mm.jit(...).program made")
        return self.run(*args, **kwargs)

    @functools.cached_property
    def residuals(self) -> frozenset[int]:
        """The buffers of what the backward of a stage and microbatch reads of its forward."""
        return saved_activations(self)

    @functools.cached_property
    def overwrites(self) -> dict[Fragment, Pairs]:
        """For each fragment, the inputs whose memory results take over: (input, result)."""
        return buffer_reuse(self)

    def verify(self) -> None:
        """Checks that the program can run, does all there is to do, and leaves nothing behind.

        Every fragment of a loop runs once for each microbatch. Every value is made before it is read, on the
        mesh where it is read; it is dropped once, after its last use; and every value that is not a result is
        dropped. A while has the same values before each iteration. The order is one for all meshes, so
        processes that follow it cannot wait for each other.

        Raises:
          VerificationError: names the instruction, the microbatch and the mesh; where meshes wait for each
            other in a circle, every instruction of the circle.
        """
        verify(self)

    def simulate(self, costs: Costs | Mapping[str, float] | None = None) -> Timeline:
        """Plays the program through, without running it.

        A while is played through once, and with it the host, which reads whether there is another iteration.

        Args:
          costs: how long fragments and transfers take: a `Costs` (such as `profile(...).costs`), or times by
            the name of a fragment (see `labels`), a phase, or "outside", in place of the default: one unit
            for a forward and for each of the two parts of a backward, nothing for transfers and for what is
            no part of a stage.

        Returns:
          The timeline: `makespan` and `bubble` say how long the step takes and how much of it devices
          idle; `peak_bytes`, `residual_bytes` and `in_flight` what is live on each at a time.

        Raises:
          ValueError: for names of what is not there, and for what the costs have no time for.

        Example:
          >>> f'{program.simulate({"forward": 1.0, "backward": 1.8}).bubble:.0%}'
          '43%'
        """
        return simulate(self, costs)

    def describe(self, i: Instruction) -> str:
        """One instruction in words."""
        return describe(self, i)

    def __str__(self) -> str:
        return printable(program_text(self), keep="\n")
