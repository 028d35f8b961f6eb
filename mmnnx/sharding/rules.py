"""Logical rules: presets that say which mesh axes the logical axes of a model are sharded over."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from mmnnx.sharding.logical import logical_names

Axes = str | tuple[str, ...] | None

ACTIVATIONS = ("batch", "sequence")
"""Logical axes that activations have and weights have not."""

MODULE_AXES = (
    *("vocab", "embed", "heads", "kv_heads", "mlp", "expert", "layers", "conv_in", "conv_out"),
    *ACTIVATIONS,
)
"""The logical axis names that `mmnnx.modules` use."""

PRESETS: dict[str, dict[str, str]] = {
    "data": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tensor": dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "model"),
    "sequence": {"sequence": "model"},
    "expert": {"expert": "expert"},
}


class LogicalRules(Mapping[str, Axes]):
    """From logical axes to mesh axes, as `logical_rules` makes them: an immutable mapping.

    Attributes:
      given: the names given by keyword that weights may have. `pipeline_sharding` warns about those that the
        model has not.

    Example:
      >>> logical_rules("tensor")["mlp"]
      'model'
    """

    def __init__(self, axes: Mapping[str, Axes], given: Iterable[str] = ()):
        self._axes = dict(axes)
        self.given = frozenset(given)

    def __getitem__(self, name: str) -> Axes:
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __hash__(self) -> int:
        return hash(frozenset(self._axes.items()))

    def __repr__(self) -> str:
        return f"LogicalRules({', '.join(f'{name}={axes!r}' for name, axes in self._axes.items())})"

    def unused(self, model: Any) -> tuple[str, ...]:
        """Logical axes that have a rule and that no Variable of a model names, without batch and sequence.

        Args:
          model: an NNX module, real or abstract (`nnx.eval_shape`), or a State.

        Example:
          >>> logical_rules("tensor").unused(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
          ('heads', 'kv_heads', 'mlp', 'vocab')
        """
        names = {name for variable in _variables(model) for name in axis_names(variable)}
        return tuple(name for name in self if name not in names and name not in ACTIVATIONS)

    def unmentioned(self, model: Any) -> tuple[str, ...]:
        """Logical axes that Variables of a model name and that have no rule, in alphabetical order.

        They are replicated, unless the mesh has an axis of that very name. A Variable's own `sharding_rules`
        count as rules. A rule of None mentions a name.

        Args:
          model: an NNX module, real or abstract (`nnx.eval_shape`), or a State.

        Example:
          >>> init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"), eager_sharding=False)
          >>> logical_rules("tensor").unmentioned(nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0)))
          ('embed',)
        """
        found: set[str] = set()
        for variable in _variables(model):
            own = {name for name, _ in variable.get_metadata().get("sharding_rules") or ()}
            found.update(axis_names(variable) - own)
        return tuple(sorted(found - self._axes.keys()))


def logical_rules(
    *presets: str,
    known: Any = (),
    mesh_axes: Mapping[str, str | Iterable[str] | None] | None = None,
    **axes: str | Iterable[str] | None,
) -> LogicalRules:
    """Which mesh axes the logical axes of a model are sharded over: a value for `Task(logical_axes=...)`.

    Args:
      *presets: any of
        "data": the batch over mesh axis "data";
        "fsdp": the batch and the "embed" axis of weights over "data" (ZeRO, arXiv:1910.02054);
        "tensor": "heads", "kv_heads", "mlp" and "vocab" over "model" (Megatron-LM, arXiv:1909.08053);
        "sequence": the "sequence" of activations over "model" (arXiv:2205.05198); where an activation has it
        and "heads" or "mlp" besides, the first of its dimensions has the mesh axis;
        "expert": "expert" over "expert" (GShard, arXiv:2006.16668).
        The axes that activations have, "batch" and "sequence", are sharded where a module computes inside of
        a task scope (`mm.task`). Where state alone is placed, as by `pipeline_sharding`, say how the batch is
        sharded: `mm.microbatch(..., arg_shardings=PartitionSpec("data"))`, or give it sharded.
      known: a model, real or abstract (`nnx.eval_shape`), whose logical names may be used besides those of
        `mmnnx.modules`; or such names, for axes that a model has only in constraints.
      mesh_axes: other mesh axes for those that the presets use: `{"model": "x"}`, a tuple of axes, or None.
      **axes: rules that override those of the presets or add to them: a mesh axis, several, or None to
        replicate.

    Returns:
      An immutable mapping, whose `unused(model)` and `unmentioned(model)` say which rules no Variable of the
      model needs, and which of its names have no rule.

    Raises:
      ValueError: an unknown preset; a keyword that is no logical axis; `mesh_axes` for an axis that no preset
        uses; a mesh axis twice in one rule.
      TypeError: a rule that is no mesh axis, several, or None.

    Example:
      >>> logical_rules("fsdp", "tensor", mlp=("model", "data"), vocab=None, mesh_axes={"model": "x"})
      LogicalRules(batch='data', embed='data', heads='x', kv_heads='x', mlp=('model', 'data'), vocab=None)
    """
    of_presets: dict[str, str] = {}
    for preset in presets:
        if not isinstance(preset, str):
            raise TypeError(f"a preset is a name, not {preset!r}: give rules of your own by keyword")
        if preset not in PRESETS:
            close = did_you_mean(preset, PRESETS)
            raise ValueError(f"there is no preset {preset!r}{close}: they are {', '.join(PRESETS)}")
        of_presets.update(PRESETS[preset])
    renamed = {axis: _normal(f"mesh_axes= {axis}", to) for axis, to in (mesh_axes or {}).items()}
    used = set(of_presets.values())
    strange = sorted(renamed.keys() - used)
    if strange:
        raise ValueError(
            f"mesh_axes= renames {', '.join(map(repr, strange))}, and the presets use "
            f"{', '.join(map(repr, sorted(used))) or 'no mesh axis'}"
        )
    rules: dict[str, Axes] = {name: renamed.get(axis, axis) for name, axis in of_presets.items()}
    own, unchecked = _known(known)
    names = {*MODULE_AXES, *own, *unchecked}
    for name in axes:
        if name not in names:
            raise ValueError(
                f"{name!r} is no logical axis{did_you_mean(name, names)}: known are "
                f"{', '.join(sorted(names))}. For a model with names of its own give known= it, or names"
            )
    rules.update({name: _normal(name, to) for name, to in axes.items()})
    return LogicalRules(rules, axes.keys() - ACTIVATIONS - unchecked)


def axis_names(variable: nnx.Variable) -> set[str]:
    """The logical axis names that a Variable's metadata gives to its dimensions; empty without any.

    Example:
      >>> import jax.numpy as jnp
      >>> axis_names(nnx.Param(jnp.ones((2, 3)), out_sharding=(None, "mlp"), eager_sharding=False))
      {'mlp'}
    """
    entries = ((entry,) if isinstance(entry, str) else entry for entry in logical_names(variable) or ())
    return {name for entry in entries if isinstance(entry, tuple | list) for name in entry}


def did_you_mean(wrong: str, names: Iterable[Any]) -> str:
    """The end of a message about a name that is none of `names`: the nearest of them, if any is near.

    Example:
      >>> did_you_mean("blcoks", ["embed", "blocks"])
      " (did you mean 'blocks'?)"
    """
    close = difflib.get_close_matches(str(wrong), [str(name) for name in names], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _known(known: Any) -> tuple[set[str], set[str]]:
    """Names out of `known`: those of the Variables of a model, and those that were listed."""
    if isinstance(known, nnx.Pytree | nnx.State):
        return {name for variable in _variables(known) for name in axis_names(variable)}, set()
    if isinstance(known, str) or not all(isinstance(name, str) for name in known):
        raise TypeError(f"known= is a model or logical axis names, not {known!r}")
    return set(), set(known)


def _variables(model: Any) -> list[nnx.Variable]:
    return [leaf for _, leaf in nnx.to_flat_state(nnx.state(model)) if isinstance(leaf, nnx.Variable)]


def _normal(what: str, axes: Any) -> Axes:
    if axes is None or isinstance(axes, str):
        return axes
    normal = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not all(isinstance(axis, str) for axis in normal):
        raise TypeError(f"the rule for {what} is a mesh axis, a tuple of them or None, not {axes!r}")
    if len(set(normal)) < len(normal):
        raise ValueError(f"the rule for {what} has a mesh axis twice: {axes!r}")
    return normal
