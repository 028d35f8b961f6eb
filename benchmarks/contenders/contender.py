"""What the contenders have in common, and the check that all of them do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass
class Contender:
    """One way to take the training step of a problem.

    Attributes:
      name: for tables.
      step: starts one step with a batch of host arrays; returns its loss.
      state: the arrays that a step writes: parameters and optimizer.
      moment: Adam's first moment of each parameter, by its path in the model.
    """

    name: str
    step: Callable[[Any], jax.Array]
    state: Callable[[], list[jax.Array]]
    moment: Callable[[], dict[str, jax.Array]]


def arrays_of(*objects: Any) -> Callable[[], list[jax.Array]]:
    """What Variables of NNX objects hold when it is called. They are looked for once: the walk takes long."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    variables = jax.tree.leaves(nnx.state(objects), is_leaf=is_variable)
    return lambda: [variable.get_raw_value() for variable in variables]


def by_path(flat: Iterable[tuple[Sequence[Any], Any]], shift: int = 0) -> dict[str, Any]:
    """Arrays by the name of their path; `shift` is the number of blocks that come before these."""
    named = {}
    for path, value in flat:
        if path[0] == "blocks":
            path = ("blocks", path[1] + shift, *path[2:])
        named["/".join(map(str, path))] = getattr(value, "value", value)
    return named


def replicate_others(tree: Any, mesh: Mesh) -> Any:
    """The tree with arrays that nobody has put anywhere (counters) on every device of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, sharding), tree)


def compare(
    name: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 3e-3
) -> None:
    """Holds Adam's first moments, which after one step are a multiple of the gradients, against each other.

    They are compared as vectors: where sums are rounded otherwise, here and there a ReLU is on the other side
    of its kink, or a token goes to another expert, and single entries differ.

    Raises:
      AssertionError: with the parameter's path, if one differs by more than `tolerance` of its norm.
    """
    assert found.keys() == expected.keys(), f"{name} has other parameters: {found.keys() ^ expected.keys()}"
    for path, value in expected.items():
        apart = np.linalg.norm(np.asarray(found[path], np.float64) - value)
        size = np.linalg.norm(np.asarray(value, np.float64))
        assert apart <= tolerance * size, (
            f"the gradient of {path}, {name}, is off by {apart:.3g}; its norm is {size:.3g}"
        )
