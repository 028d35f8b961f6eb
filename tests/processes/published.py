"""One of several processes that load a published model, add to it, and write it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import mmnnx as mm
from mmnnx.modules import hf, lora


def main(coordinator: str, count: str, number: str, source: str, target: str) -> None:
    mm.initialize(coordinator, int(count), int(number))
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"))
    place = lambda model: mm.pipeline_sharding(model, 2, rules=mm.logical_rules("tensor"))
    tokens = np.arange(48).reshape(2, 24) % 64
    with mesh:
        for scan in (False, True):
            model = hf.load(source, placement=place, scan=scan)
            logits = mm.fetch(mm.jit(lambda model, tokens: model(tokens))(model, tokens))
            hf.save(model, f"{target}/scan-{scan}")
            assert (Path(target) / f"scan-{scan}" / "config.json").exists(), "in every process"
            try:
                hf.save(model, f"{target}/scan-{scan}")
            except OSError as error:
                assert "is there and is not empty" in str(error), error
            else:
                raise AssertionError("it was there")
            hf.save_adapter(lora(model, 2), f"{target}/adapter-{scan}")
            assert (Path(target) / f"adapter-{scan}" / "adapter_config.json").exists()
            if number == "0":
                np.save(Path(target) / f"logits-{scan}.npy", logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
