"""What a trace shows of the arrays of an NNX function: state paths, rules, which result updates what."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Sharding

from mmnnx.mpmd.frontend.graph import Path
from mmnnx.mpmd.frontend.optimizer_state import are_clear
from mmnnx.sharding.division import Division
from mmnnx.sharding.task import Task


class Rule(NamedTuple):
    """What in_shardings or out_shardings ask for.

    Attributes:
      task: the task, if one was named, or those that the array is divided between.
      sharding: the sharding.
      own: False for optimizer state that has the rule of its parameter; True for all else.
      path: the state path that was placed.
      text: which rule of a TaskSharding it is.
    """

    task: Task | Division | None
    sharding: Sharding
    own: bool = True
    path: Path = ()
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the arguments or results of a function.

    Attributes:
      path: from the argument (its number or name) or the result to the array.
      within: the same from the NNX object that is the argument or result itself: the state path.
      is_variable: whether a Variable holds it.
      is_optimizer_state: whether an optimizer keeps it (mu, nu, ...).
      rule: what in_shardings or out_shardings ask for it.
      updates: for the new value of an argument's state, the number of the input.
      origin: for optimizer state that was made for an argument's parameter, the path of that parameter, if
        the trace was asked for it.
    """

    path: Path
    within: Path
    is_variable: bool = False
    is_optimizer_state: bool = False
    rule: Rule | None = None
    updates: int | None = None
    origin: Path | None = None

    def __str__(self) -> str:
        return ".".join(map(str, self.path)) or "the value"


@dataclasses.dataclass
class Record:
    """What one trace showed.

    Attributes:
      inputs, results: every input and every result, in flat order.
      references: for each input that is a reference, by number, what is known of what it holds in the end.
      out_tree: structure of what the function returned, if that is arrays and new Variables alone and its
        arguments are of the same Variables and modules as before; else None.
    """

    inputs: list[Leaf | None] = dataclasses.field(default_factory=list)
    results: list[Leaf | None] = dataclasses.field(default_factory=list)
    references: dict[int, Leaf] = dataclasses.field(default_factory=dict)
    out_tree: Any = None

    def needs_origins(self) -> bool:
        """Whether paths do not tell which parameters the optimizer state belongs to that was made."""
        new = [
            leaf.path
            for leaf in self.results
            if leaf is not None and leaf.is_optimizer_state and leaf.updates is None
        ]
        known = (leaf.path for leaf in self.inputs if leaf is not None and not leaf.is_optimizer_state)
        return bool(new) and not are_clear(known, new)

    def names(self) -> list[str]:
        """What messages call the inputs: "0.blocks.3.mlp.kernel", "argument 2"."""
        return [
            str(leaf) if leaf is not None and leaf.within else f"argument {n if leaf is None else leaf}"
            for n, leaf in enumerate(self.inputs)
        ]
