"""Checkpoints: the state of a run, written while it goes on and read back to where it lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import checkpoint_managers as managers


class Checkpoints:
    """The checkpoints in a folder, of which two are kept: the latest, and that of the best validation loss.

    >>> checkpoints = Checkpoints(Path("run/checkpoints"))
    >>> checkpoints.save(100, {"model": model}, {"data": batches.get_state()}, val_bits_per_byte=2.5)
    >>> checkpoints.restore(checkpoints.latest, {"model": model})["data"]
    {'next_index': 100}
    """

    def __init__(self, folder: Path):
        best = managers.BestN(get_metric_fn=lambda metrics: -metrics["val_bits_per_byte"], n=1)
        keep = managers.AnyPreservationPolicy([managers.LatestN(1), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=keep)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint; None when there is none."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints kept, earliest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, nodes: dict[str, Any], extra: dict[str, Any], *, val_bits_per_byte: float
    ) -> None:
        """Save the state of the NNX ``nodes`` and the JSON values ``extra``.

        Returns as soon as the state may change again, and writes in the background.
        """
        items = ocp.args.Composite(state=ocp.args.StandardSave(_state(nodes)), extra=ocp.args.JsonSave(extra))
        self._manager.save(step, args=items, metrics={"val_bits_per_byte": val_bits_per_byte})

    def restore(self, step: int, nodes: dict[str, Any]) -> dict[str, Any]:
        """Set ``nodes`` to what was saved at ``step``, each array where it lives now; returns ``extra``."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _state(nodes))
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        for name, node in nodes.items():
            nnx.update(node, restored.state[name])
        return restored.extra

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.close()


def _state(nodes: dict[str, Any]) -> dict[str, Any]:
    return {name: nnx.to_pure_dict(nnx.state(node)) for name, node in nodes.items()}
