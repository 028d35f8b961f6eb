"""Contexts that change what `mm.jit` does with the functions that are called in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mmnnx.mpmd.place.options import fusing, recomputing
from mmnnx.sharding.task_scope import ignoring


@contextlib.contextmanager
def ignore_transforms(ignore: bool = True) -> Iterator[None]:
    """Makes `mm.jit` plain `nnx.jit` on one device, for debugging.

    Example:
      >>> with mm.ignore_transforms():
      ...     loss = train_step(model, optimizer, batch)
    """
    token = ignoring.set(ignore)
    try:
        yield
    finally:
        ignoring.reset(token)


@contextlib.contextmanager
def enable_recomputation(enable: bool = True) -> Iterator[None]:
    """Whether work that several tasks need and that depends on no placed state is done by each of them.

    What is made of the batch alone, such as masks and casts, is: to compute it again is cheaper than to send
    it. Switched off, each is computed once, where it is needed first, and sent to the others. What depends on
    nothing at all, such as positions, is never sent.

    Example:
      >>> with mm.enable_recomputation(False):
      ...     loss = train_step(model, optimizer, batch)
    """
    token = recomputing.set(enable)
    try:
        yield
    finally:
        recomputing.reset(token)


@contextlib.contextmanager
def enable_task_fusion(enable: bool = True, *, loops_only: bool = False) -> Iterator[None]:
    """Whether neighbouring tasks on one TaskMesh become one, and so one XLA program for each phase.

    Otherwise (the default) each task is a fragment of its own, and in a microbatch loop a stage. All of a
    function that touches one TaskMesh is one fragment, unless `enable_task_fusion(False)` is said.

    Args:
      enable: whether they do.
      loops_only: only in microbatch loops.

    Example:
      >>> with mm.enable_task_fusion():
      ...     loss = train_step(model, optimizer, batch)
    """
    token = fusing.set(("loops" if loops_only else "all") if enable else "none")
    try:
        yield
    finally:
        fusing.reset(token)
