"""JAX's error about arrays on several groups of devices, with one sentence more: `mm.jit` is for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CALL_IN_JIT = (
    "A model on several submeshes is called in a function of mm.jit, as in "
    "mm.jit(lambda m, x: m(x))(model, x), with mm.jit around all else: mm.jit(nnx.grad(f)), not "
    "nnx.grad(mm.jit(f)), and no nnx.jit around it. Results on several submeshes are combined there too, or "
    "on the host: mm.fetch brings them there"
)


def advise(
    error: BaseException | None,
    advice: str = CALL_IN_JIT,
    tasks: Callable[[], Mapping[tuple[tuple[str, int], ...], str]] = dict,
) -> None:
    """Adds advice to an error, if it is that one of JAX and has none yet.

    Args:
      error: what was raised.
      advice: one or more sentences that name mm.jit.
      tasks: returns, by the platforms and numbers of devices, the name of the task that has state there.
    """
    plain = isinstance(error, ValueError) and "incompatible devices" in str(error)
    in_transformation = type(error).__name__ == "DeviceAssignmentMismatchError"
    if error is None or not (plain or in_transformation):
        return
    if any("mm.jit" in note for note in getattr(error, "__notes__", ())):
        return
    found = re.findall(r"device ids \[([\d, ]+)\]", str(error))
    groups = dict.fromkeys(tuple(map(int, ids.split(", "))) for ids in found)
    names = {tuple(number for _, number in devices): name for devices, name in tasks().items()}
    whose = [f"devices {list(ids)} are those of task {names[ids]!r}" for ids in groups if ids in names]
    error.add_note(f"{advice}. Here {' and '.join(whose)}" if whose else advice)


def advising(fun: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose errors about arrays on several groups of devices say what to do."""

    @functools.wraps(fun)
    def advised(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fun(*args, **kwargs)
        except ValueError as error:
            advise(error)
            raise

    return advised
