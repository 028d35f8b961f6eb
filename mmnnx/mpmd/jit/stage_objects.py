"""What `.trace`, `.lower` and `.compile` of mm.jit return: Flax's objects with all that those of JAX have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from mmnnx import _compat


class _Stage:
    """A stage of Flax, which knows how to call a function of NNX objects, around one of JAX or of ours.

    Attributes that are not listed are those of `jax.stages`, of what NNX makes of the function: one over
    pytrees of arrays, which returns the new values of state as well.
    """

    def __init__(self, stage: Any):
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy and pickle ask for, before there is a _stage
            raise AttributeError(name)
        return getattr(_compat.inner_stage(self._stage), name)

    def __repr__(self) -> str:
        inner = _compat.inner_stage(self._stage)
        program = getattr(inner, "program", None)  # of several TaskMeshes, once it is lowered
        of = f": {program.summary}" if program is not None else ""
        return f"{type(self).__name__}({getattr(inner, 'fun_name', 'function')}{of})"


class Traced(_Stage):
    """A traced function: `jax.stages.Traced`, for NNX objects."""

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> Lowered:
        """Lowers it, and splits it if it is of several TaskMeshes."""
        return Lowered(self._stage.lower(lowering_platforms=lowering_platforms))


class Lowered(_Stage):
    """A lowered function: `jax.stages.Lowered`, for NNX objects and for one or several XLA programs.

    Of several, `cost_analysis()` is the sum over one call of the function, and `as_text()` without a dialect
    the `Program` as it prints.
    """

    @property
    def fragments(self) -> dict[str, jax.stages.Lowered]:
        """Each XLA program by itself, by name, with its `as_text`, `cost_analysis` and so on."""
        return _fragments(_compat.inner_stage(self._stage))

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles it. Options for XLA are added to those of `mm.jit`, and hold for each XLA program."""
        return Compiled(self._stage.compile(compiler_options))


class Compiled(_Stage):
    """A compiled function: `jax.stages.Compiled`, for NNX objects and for one or several XLA programs.

    Of several, `cost_analysis()` is the sum over one call of the function, `memory_analysis()` the sum over
    all XLA programs, and `as_text()` has each of them.

    Example:
      >>> compiled = train_step.lower(model, optimizer, batch).compile()
      >>> sizes = {name: f.memory_analysis().temp_size_in_bytes for name, f in compiled.fragments.items()}
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it, without static arguments.

        Raises:
          TypeError: for arguments of other types than it was compiled for, and under a transformation.
          ValueError: for an argument that lives elsewhere.
        """
        return self._stage(*args, **kwargs)

    @property
    def fragments(self) -> dict[str, jax.stages.Compiled]:
        """Each XLA program by itself, by name, with its `as_text`, `memory_analysis` and so on."""
        return _fragments(_compat.inner_stage(self._stage))

    @property
    def input_layouts(self) -> Any:
        """`input_formats`, as Flax calls them."""
        return self.input_formats


def _fragments(stage: Any) -> dict[str, Any]:
    """The XLA programs of a stage, of which one of JAX is one."""
    by_jax = isinstance(stage, jax.stages.Lowered | jax.stages.Compiled)
    return {"the function": stage} if by_jax else stage.fragments
