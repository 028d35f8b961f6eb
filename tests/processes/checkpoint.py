"""Saves and restores in several processes, and checks what each can see.

Arguments: COORDINATOR COUNT NUMBER, then a JSON list of [what, grid, folder]:
  "restore": onto new nodes, of which each process compares its own part with `folder/values.npz`; two steps
             from there have the losses of `folder/losses.json`
  "save":    the nodes, with values.npz and the losses of the next two steps beside them
  "abstract": as "restore", onto abstract nodes
  "full":    the nodes, at a moment when the disk of the last process is full, and again
  "damaged": what restoring raises is written to `folder/told.NUMBER`
"""

import json
import resource
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import mmnnx as mm
from mmnnx.train.checkpoint import CheckpointError, Checkpoints, read
from mmnnx.train.checkpoint.nnx_state import arrays_of
from tests.train.states import Net, adam, born, losses, placed

COORDINATOR, COUNT, NUMBER, TODO = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])

regions: list[tuple[tuple[int, ...], int]] = []  # shape and bytes of all that this process reads


def spy(store, region, real=read._read):
    part = store[region] if region else store
    regions.append((part.shape, part.size * part.dtype.numpy_dtype.itemsize))
    return real(store, region)


read._read = spy


def own(nodes):
    """The shards of this process, by path: (index, values)."""
    found = {}
    for path, x in arrays_of(nodes).items():
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        indices = x.sharding.addressable_devices_indices_map(x.shape)
        parts = [(indices[s.device], s.data) for s in x.addressable_shards]
        found["/".join(path)] = [(i, np.asarray(jax.random.key_data(d) if is_key else d)) for i, d in parts]
    return found


def check(nodes, folder):
    """That this process's part is what was saved, and that no more was read than it consists of."""
    expected, size = np.load(folder / "values.npz"), 0
    shards = own(nodes)
    assert set(shards) == set(expected.files)
    for name, parts in shards.items():
        for index, data in parts:
            assert data.tobytes() == expected[name][index].tobytes(), name
        size += sum({str(index): data.nbytes for index, data in parts}.values())
    assert sum(nbytes for _, nbytes in regions) == size, "each distinct shard is read once, and nothing else"
    whole = sum(expected[name].nbytes for name in expected.files)
    assert COUNT == 1 or size < whole
    regions.clear()


def gathered(nodes):
    """Everything, on every process."""
    return {"/".join(path): mm.fetch(x) for path, x in arrays_of(nodes).items()}


if COUNT > 1:
    mm.initialize(COORDINATOR, COUNT, NUMBER)
made = {}
for what, grid, name in TODO:
    folder = Path(name)
    if grid not in made:
        made[grid] = born(grid, seed=1)
    mesh, nodes = made[grid]
    if what in ("restore", "abstract"):
        if what == "abstract":
            nodes = {
                "model": nnx.eval_shape(lambda: Net(1)),
                "optimizer": nnx.eval_shape(lambda: nnx.Optimizer(Net(1), adam(), wrt=nnx.Param)),
            }
        with mesh:
            restored = Checkpoints(folder).restore(nodes, sharding=placed(grid)[1])
        assert restored.data == {"next_index": 3} and restored.metrics == {"loss": 0.5}
        check(nodes, folder)
        np.testing.assert_allclose(
            losses(mesh, nodes), json.loads((folder / "losses.json").read_text()), rtol=1e-5
        )
    elif what == "save":
        with mesh, Checkpoints(folder, keep=1) as checkpoints, Checkpoints(f"{folder}.beside") as beside:
            for step in (1, 2):  # more than one: what orbax calls its barriers is used again
                checkpoints.save(step, nodes, data={"next_index": 3}, metrics={"loss": 0.5})
                beside.save(step, nodes)
        assert checkpoints.steps == beside.steps == [2]
        held = gathered(nodes)
        next_losses = losses(mesh, nodes)
        if NUMBER == 0:
            np.savez(folder / "values.npz", **held)
            (folder / "losses.json").write_text(json.dumps(next_losses))
    elif what == "full":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if NUMBER == COUNT - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with mesh, Checkpoints(folder) as checkpoints:
            checkpoints.save(1, nodes)
            try:
                checkpoints.wait()
            except CheckpointError as error:
                assert "File too large; there is no other" in str(error)
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                checkpoints.save(2, nodes)
        assert checkpoints.steps == [2]
    else:
        try:
            Checkpoints(folder).restore(nodes)
        except CheckpointError as error:
            (folder / f"told.{NUMBER}").write_text(str(error))
    print(f"process {NUMBER}: {what} {grid} {folder.name}", flush=True)
