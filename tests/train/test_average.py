"""The moving average of the weights: what it is, where it lives, what it costs, and who reads it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx

from mmnnx.cli import main
from mmnnx.train import TrainConfig, train
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.devices import choose_devices
from mmnnx.train.metrics import Meter
from mmnnx.train.run_folder import read_run
from mmnnx.train.step import create, make_model, make_train_step, place, trained
from tests.train.published import publish

LAYOUTS = {
    "one device": dict(stages=1, layers=2),
    "fsdp and tensor": dict(stages=2, data_parallel=2, fsdp=True, tensor=2, layers=2),
    "scanned, interleaved": dict(stages=2, virtual_stages=2, schedule="looped-bfs", scan=True, layers=4),
    "additions, scanned": dict(stages=2, scan=True, lora=2, layers=8),
}
DECAY = 0.8


def arrays(state: nnx.State) -> dict:
    """The raw values of a state, by path."""
    return {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(state)}


def peaks(config: TrainConfig, batch: dict[str, np.ndarray]) -> tuple[int, dict[str, int]]:
    """The transfers of a step, and the bytes that it has on each mesh."""
    mesh, placement = place(config, choose_devices(config.devices))
    with mesh:
        program = make_train_step(config).program(*create(config, placement), batch)
    return len(program.transfers), program.simulate().peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_that_of_numpy_lives_beside_the_weights_and_costs_a_copy(layout, config, tmp_path):
    options = LAYOUTS[layout] | dict(batch=8, ema=DECAY)
    if "lora" in options:
        publish(tmp_path / "model")
        options |= dict(model=tmp_path / "model", width=96, heads=4, mlp=256)
    c = config(**options)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    weights = np.full((8, 16), 1 / 128, np.float32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}
    mesh, placement = place(c, choose_devices(c.devices))
    steps = []
    with mesh:
        model, optimizer = create(c, placement)
        train_step = make_train_step(c)
        program = train_step.program(model, optimizer, batch)
        for _ in range(4):
            train_step(model, optimizer, batch)
            now = arrays(nnx.state(model, trained(c)))
            steps.append({path: np.asarray(x) for path, x in now.items()})
    shares = DECAY ** np.arange(3, -1, -1)
    average = arrays(optimizer.opt_state[-1].weights)
    assert average.keys() == now.keys() and len(average) > 4
    for path, x in average.items():
        expected = np.average([step[path] for step in steps], axis=0, weights=shares)
        np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-5, atol=1e-7)
        assert x.dtype == np.float32 and x.sharding == now[path].sharding
    transfers, before = peaks(config(**options | dict(ema=0.0)), batch)
    assert len(program.transfers) == transfers
    more = {name: peak - before[name] for name, peak in program.simulate().peak_bytes.items()}
    counts = 4 * 2 * mesh.mesh.size  # of steps, on every device
    copy = sum(x.nbytes for x in now.values()) * (c.data_parallel if not c.fsdp else 1)
    assert 0 < sum(more.values()) <= copy + counts


@pytest.mark.slow
def test_validations_and_checkpoints_have_the_average_and_training_goes_on_without(
    config, tmp_path, monkeypatch, whole, text, capsys
):
    options = dict(ema=DECAY, sample=4)
    averaged = train(config(**options, out=tmp_path / "averaged"))
    losses = lambda folder: [row["loss"] for row in folder.rows() if "loss" in row]
    bits = lambda folder: {r["step"]: r["val_bits_per_byte"] for r in folder.rows() if "val_loss" in r}
    assert losses(averaged) == losses(whole)
    assert bits(averaged)[0] == bits(whole)[0] and bits(averaged)[7] > bits(whole)[7]  # it is behind

    def killed(self, step, values):
        if step == 5:  # which no checkpoint has
            raise KeyboardInterrupt
        usual(self, step, values)

    usual = Meter.step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Meter, "step", killed)
        train(config(**options))
    resumed = train(config(**options, resume=True))
    assert losses(resumed) == losses(whole) and bits(resumed) == bits(averaged)
    models = []
    for folder in (averaged, resumed, whole):
        models.append(nnx.eval_shape(lambda: make_model(config())))
        Checkpoints(folder.checkpoints).restore({"model": models[-1]})
    of_averaged, of_resumed, of_whole = (arrays(nnx.state(model)) for model in models)
    for path, x in of_averaged.items():
        np.testing.assert_array_equal(x, of_resumed[path])
    assert any((x != of_whole[path]).any() for path, x in of_averaged.items())
    assert (resumed.path / "sample.txt").read_bytes() == (averaged.path / "sample.txt").read_bytes()

    line = ["eval", "--data", str(text), "--sequence", "16", "--json"]
    found = []
    for folder in (averaged, whole):
        assert main([*line[:1], str(folder.path), *line[1:]]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["bits_per_byte"])
    assert found[0] > found[1]
    assert read_run(averaged.path)[1].ema == DECAY
