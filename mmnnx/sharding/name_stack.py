"""The name stack of an equation as text: the name scopes in it, and whether it is part of a backward."""

from __future__ import annotations

import functools
import re


def is_backward(name_stack: str, outermost: bool = False) -> bool:
    """Whether an equation with this name stack is part of a backward pass.

    Args:
      name_stack: such as "transpose(jvp(task[3:stage 0]))/dense".
      outermost: count only the backward of the outermost derivative. "jvp(layer)/transpose(jvp())" is the
        gradient that a layer takes inside its own forward: part of a backward, but not of the outermost one.
    """
    if outermost:
        mark = re.search(r"jvp\(|transpose\(", name_stack)
        return mark is not None and mark[0] == "transpose("
    return "transpose(" in name_stack


@functools.lru_cache(maxsize=16384)
def scopes(name_stack: str) -> tuple[str, ...]:
    """The name scopes in a name stack, outermost first, without the transformations around them.

    >>> scopes("transpose(jvp(stage0))/dense")
    ('stage0', 'dense')
    """
    names: list[str] = []
    depth = start = 0
    for end, char in enumerate(name_stack + "/"):
        depth += (char == "(") - (char == ")")
        if char == "/" and (depth <= 0 or end == len(name_stack)):
            part = name_stack[start:end]
            start = end + 1
            wrapped = re.fullmatch(r"(?:jvp|transpose|vmap)\((.*)\)", part)
            names += scopes(wrapped[1]) if wrapped else [part] if part else []
    return tuple(names)
