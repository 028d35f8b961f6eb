"""The memory of each mesh, in the rows of validations."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from mmnnx.train import train
from mmnnx.train.devices import choose_devices
from mmnnx.train.memory import bytes_in_use
from mmnnx.train.step import create, place


@pytest.mark.slow
def test_where_devices_do_not_count_it_is_what_the_program_needs(config):
    c = config(stages=2, tensor=2, layers=4, steps=4, eval_every=2)
    first, *others = (row for row in train(c).rows() if "val_loss" in row)
    mesh, placement = place(c, choose_devices(c.devices))
    with mesh:
        state = jax.tree.leaves(nnx.state(create(c, placement)))
    held = [
        sum(s.data.nbytes for x in state for s in x.addressable_shards if s.device == devices.flat[0])
        for devices in mesh.devices
    ]
    names = [f"program_peak_bytes/stage{n}" for n in range(2)]
    assert len(others) == 2 and not first.keys() & {*names}
    for row in others:
        found = [row[name] for name in names]
        assert all(state < n < 20 * state for state, n in zip(held, found)) and found[0] != found[1]


def device(process: int, stats: dict[str, int] | None) -> SimpleNamespace:
    return SimpleNamespace(process_index=process, memory_stats=lambda: stats)


def test_where_devices_count_it_is_the_fullest_of_a_mesh():
    in_use = lambda n: {"bytes_in_use": 1, "peak_bytes_in_use": n}
    meshes = [[device(0, in_use(5)), device(0, in_use(7))], [device(0, in_use(3)), device(1, None)]]
    assert bytes_in_use(np.array(meshes)) == {"stage0": 7, "stage1": 3}
    assert bytes_in_use(np.array([[device(0, None)], [device(0, {})]])) == {}
