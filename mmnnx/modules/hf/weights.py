"""The safetensors files of a folder: which tensors there are, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from mmnnx.json_object import read_json_object
from mmnnx.printable import first_few

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of weights, by their names in safetensors."""

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 4  # names that a message lists

# Tensors that some checkpoints hold besides the weights: what can be computed.
NO_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Weights:
    """The tensors in a folder. Only what is asked for is read.

    Attributes:
      folder: the folder.
      files: for each tensor the name of its file, in the order of the folder's index.
      metadata: what the index says besides; nothing where there is none.

    Raises:
      FileNotFoundError: for a folder without safetensors, or without one of its files.
      ValueError: for a file that is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.metadata: dict[str, Any] = {}
        self._open: dict[str, Any] = {}
        index = self.folder / INDEX
        if index.is_file():
            said = read_json_object(index)
            self.files: dict[str, str] = said.get("weight_map", {})
            if not isinstance(self.files, dict) or not {str}.issuperset(map(type, self.files.values())):
                raise ValueError(f"{index}: weight_map must name the file of each tensor")
            self.metadata = said.get("metadata", {})
            for file in dict.fromkeys(self.files.values()):
                held = set(self._handle(file).keys())
                lost = [name for name, own in self.files.items() if own == file and name not in held]
                if lost:
                    raise ValueError(f"{index} says that {lost[0]} is in {file}, which does not hold it")
        elif (self.folder / ONE_FILE).is_file():
            self.files = dict.fromkeys(self._handle(ONE_FILE).keys(), ONE_FILE)
        else:
            raise FileNotFoundError(
                f"{self.folder} has neither {ONE_FILE} nor {INDEX}: the weights are missing"
            )

    def mismatch(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """What differs from the tensors of a model; "" if nothing does."""
        missing = [name for name in shapes if name not in self.files]
        surplus = [name for name in self.files if name not in shapes and not name.endswith(NO_WEIGHTS)]
        others = [
            f"{name} is {self.shape(name)} and not {shape}"
            for name, shape in shapes.items()
            if name in self.files and self.shape(name) != shape
        ]
        said = [_some("it has no {}", missing), _some("it has {}, which the model has not", surplus)]
        return "; ".join(filter(None, [*said, _some("{}", others)]))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor.

        Raises:
          ValueError: for one that is not computed with, such as the eight bits of quantised weights.
        """
        found = self._slice(name).get_dtype()
        if found not in DTYPES:
            raise ValueError(f"{name} in {self.folder} is {found}: weights are {', '.join(DTYPES)}")
        return jnp.dtype(DTYPES[found])

    def read(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor."""
        return self._slice(name)[region]

    def _slice(self, name: str) -> Any:
        return self._handle(self.files[name]).get_slice(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: {INDEX} names it")
            try:
                self._open[file] = safe_open(path, "np")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from error
        return self._open[file]


def _some(text: str, names: list[str]) -> str:
    return text.format(first_few(names, SHOWN)) if names else ""
