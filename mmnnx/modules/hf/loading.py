"""A published checkpoint as a model whose weights are on their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from mmnnx.modules.build import build
from mmnnx.modules.hf.configs import read_config
from mmnnx.modules.hf.tensors import Piece, pieces_of, tensor_shapes
from mmnnx.modules.hf.weights import Weights
from mmnnx.modules.lm import LM
from mmnnx.sharding.held_parts import Bounds, array_of_parts, held_parts
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.state_shardings import shardings_of


def abstract(folder: str | FilePath, *, dtype: Any = None, param_dtype: Any = None, **changes: Any) -> LM:
    """The model in a folder, without its weights: for a placement, a table or a plan.

    The arguments are those of `load`.

    Example:
      >>> save(mm.modules.LM(mm.modules.LMConfig(), rngs=nnx.Rngs(0)), "tiny")
      >>> placement = mm.pipeline_sharding(abstract("tiny"), stages=4)
    """
    if dtype is not None:
        changes["dtype"] = jnp.dtype(dtype)
    if param_dtype is not None:
        changes["param_dtype"] = jnp.dtype(param_dtype)
    return nnx.eval_shape(lambda: build(read_config(folder, **changes)))


def load(
    folder: str | FilePath,
    *,
    placement: TaskSharding | Callable[[LM], TaskSharding] | None = None,
    dtype: Any = None,
    param_dtype: Any = None,
    **changes: Any,
) -> LM:
    """Reads a published model. Each device's part of a weight is read from the files by itself.

    Llama 2 and 3, Mistral, Mixtral, Qwen 2.5, Qwen 3, Qwen 3 with experts, Gemma 2, Gemma 3 (text) and GPT-2,
    as `transformers` stores them. Call it inside `with mm.MultiMesh(...)` if tasks are of one.

    Args:
      folder: with `config.json` and `model.safetensors`, or several such files and their index.
      placement: where the weights go, or what makes that of the abstract model. Default: the default device.
      dtype: what activations are computed in. Default: the dtype that `config.json` names, else that of the
        first weight in the files.
      param_dtype: what weights are kept in. Default: the same.
      **changes: fields of the config to set otherwise, such as `scan=True` or `remat=True`.

    Returns:
      An `LM`, `MoELM`, `Gemma` or `GPT2`; its `source` is the folder.

    Raises:
      FileNotFoundError: for files that are not there.
      ValueError: for an architecture or a field of the config that is not known, tensors that are missing or
        more than there should be, or of another shape; names them. Nothing is placed then.
      PlacementError: for weights that the placement does not place.

    Example:
      >>> save(mm.modules.LM(mm.modules.LMConfig(), rngs=nnx.Rngs(0)), "tiny-lm")  # or a download
      >>> with mesh:
      ...     model = load("tiny-lm", placement=lambda model: mm.pipeline_sharding(model, stages=4))
      >>> len(model.blocks)
      8
    """
    model = abstract(folder, dtype=dtype, param_dtype=param_dtype, **changes)
    weights = Weights(folder)
    pieces = pieces_of(model, weights.files)
    shapes = tensor_shapes(pieces)
    if wrong := weights.mismatch(shapes):
        raise ValueError(
            f"the tensors in {weights.folder} are not those that its config.json asks for: {wrong}"
        )
    for name in shapes:
        weights.dtype(name)  # raises for one that there is not
    if placement is not None and not isinstance(placement, TaskSharding):
        placement = placement(model)
    shardings: Mapping[Any, Sharding] = {}
    if placement is not None:
        shardings = {path[1:]: s for path, s in shardings_of({"model": model}, placement).items()}
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        like = variable.get_raw_value()
        sharding = shardings.get(tuple(map(str, path)))
        variable.set_raw_value(_read(weights, pieces[path], like, sharding))
    nnx.update(model, state)
    model.source = str(folder)
    return model


def _read(weights: Weights, pieces: tuple[Piece, ...], like: Any, sharding: Sharding | None) -> jax.Array:
    """An array of its pieces."""
    if sharding is None:
        whole = tuple((0, size) for size in like.shape)
        return jnp.asarray(_part(weights, pieces, like, whole))
    parts = dict.fromkeys(held_parts(sharding, like.shape).values())
    hosts = {part: _part(weights, pieces, like, part) for part in parts}
    return array_of_parts(like.shape, like.dtype, sharding, hosts)


def _part(weights: Weights, pieces: tuple[Piece, ...], like: Any, part: Bounds) -> np.ndarray:
    """A part of an array in host memory."""
    depth = len(pieces[0].index)
    by_index = {piece.index: piece for piece in reversed(pieces)}
    outer, inner = part[:depth], part[depth:]
    out = np.empty([stop - start for start, stop in part], like.dtype)
    for index in product(*(range(*bounds) for bounds in outer)):
        piece = by_index[index]
        region = list(inner)
        region[-1:] = [(piece.start + start, piece.start + stop) for start, stop in inner[-1:]]
        read = weights.read(
            piece.tensor, tuple(slice(*b) for b in (region[::-1] if piece.transposed else region))
        )
        out[tuple(n - start for n, (start, _) in zip(index, outer))] = read.T if piece.transposed else read
    return out
