"""A model as a folder that `transformers` and others load."""

from __future__ import annotations

import functools
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mmnnx.json_object import read_json_object
from mmnnx.modules.gpt2 import GPT2Config
from mmnnx.modules.hf.configs import CONFIG, read_config, write_config
from mmnnx.modules.hf.tensors import Path, Piece, pieces_of, tensor_shapes
from mmnnx.modules.hf.weights import DTYPES, INDEX, ONE_FILE, Weights
from mmnnx.modules.lm import LM
from mmnnx.mpmd.distributed.done_by_first import done_by_first
from mmnnx.mpmd.distributed.fetch import fetch
from mmnnx.sharding.held_parts import held_row

FILE_BYTES = 5 * 10**9
"""The most that is in one file, as `transformers` has it."""

OLD_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq")
"""Fields of rotary positions from before there was `rope_parameters`."""

COMPANIONS = (".json", ".jinja", ".model", ".txt")  # a tokenizer's files, and how text is generated


def save(
    model: LM,
    folder: str | FilePath,
    *,
    like: str | FilePath | None = None,
    dtype: Any = None,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes a model as a folder of the Hugging Face hub.

    Names of tensors, their dtypes, the files that they are in, and the fields of `config.json` are those of
    the folder that the model was loaded from, but for fields that the model has changed, such as a window;
    its tokenizer is copied as well. What was loaded in the dtype of its files and not changed is equal byte
    by byte. Of a model that was not loaded, files hold up to 5 GB. Low-rank additions (`lora`) are merged
    into the kernels that they are for. Published models have no `capacity_factor` of experts: it is left out,
    with a warning.

    In several processes each must call it. The first writes, and all return when it has; an OSError in it is
    one in all of them.

    Args:
      model: an `LM`, `MoELM`, `Gemma` or `GPT2`, wherever its weights live.
      folder: a new or empty one. It is there when all of it is.
      like: another folder to take these from than the one that it was loaded from (`model.source`).
      dtype: what all weights are written in: float64, float32, float16 or bfloat16. Default: as in `like`,
        else as they are kept.
      max_position_embeddings: the field of `config.json`, the longest sequence, in tokens, that programs
        should give the model. Default: as in `like`, else the field is left out.

    Raises:
      FileExistsError: for a folder that holds something.
      OSError: if it cannot be written. Nothing is left of it then.
      ValueError: for a model that is none of a published architecture, or another one than that of `like`,
        and for another dtype; for `max_position_embeddings` of a GPT2, whose table of positions has a size.

    Example:
      >>> save(mm.modules.LM(mm.modules.LMConfig(layers=1), rngs=nnx.Rngs(0)), "fine-tuned")
      >>> sorted(file.name for file in Path("fine-tuned").iterdir())
      ['config.json', 'model.safetensors']
    """
    if dtype is not None and jnp.dtype(dtype).name not in DTYPES.values():
        raise ValueError(f"dtype={jnp.dtype(dtype).name}: weights are {', '.join(DTYPES.values())}")
    if max_position_embeddings is not None and isinstance(model.config, GPT2Config):
        raise ValueError(
            f"max_position_embeddings={max_position_embeddings}: a GPT2 has a table of "
            f"{model.config.positions} positions. Leave it out"
        )
    if (factor := getattr(model.config, "capacity_factor", None)) is not None:
        warnings.warn(f"capacity_factor={factor} is not saved: published models drop no tokens", stacklevel=2)
    target = _new(folder)
    source = like if like is not None else getattr(model, "source", None)
    weights = None if source is None else Weights(source)
    pieces = pieces_of(model, None if weights is None else weights.files)
    shapes = tensor_shapes(pieces)
    if weights is not None and (wrong := weights.mismatch(shapes)):
        raise ValueError(f"the model is not of the shape of the one in {source}: {wrong}")
    kept = _kept_dtypes(model, pieces)
    if dtype is not None:
        dtypes = dict.fromkeys(shapes, jnp.dtype(dtype))
    else:
        dtypes = kept if weights is None else {name: weights.dtype(name) for name in shapes}
    config = _config(model, source, dtypes)
    if max_position_embeddings is not None:
        config["max_position_embeddings"] = max_position_embeddings
    files = _files(shapes, dtypes) if weights is None else {name: weights.files[name] for name in shapes}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        written = FilePath(scratch) / "model"
        written.mkdir()
        for file in dict.fromkeys(files.values()):
            names = [name for name in shapes if files[name] == file]
            tensors = _tensors(model, pieces, names, dtypes)
            # After each file, or the others would send all that they have at once.
            with done_by_first(f"write {file}") as first:
                if first:
                    _write(tensors, written / file)
        with done_by_first("complete the folder") as first:
            if not first:
                return
            if set(files.values()) != {ONE_FILE}:
                total = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
                metadata = ({} if weights is None else weights.metadata) | {"total_size": total}
                (written / INDEX).write_text(_json({"metadata": metadata, "weight_map": files}))
            (written / CONFIG).write_text(_json(config))
            for path in sorted(FilePath(source).iterdir()) if source is not None else ():
                if path.suffix in COMPANIONS and path.name not in (CONFIG, INDEX):
                    shutil.copy(path, written / path.name)
            written.replace(target)


def save_adapter(model: LM, folder: str | FilePath) -> None:
    """Writes the low-rank additions of a model alone, in the format of PEFT (`adapter_model.safetensors`).

    In several processes each must call it. The first writes, and all return when it has; an OSError in it is
    one in all of them.

    Args:
      model: one that `mmnnx.modules.lora` has changed.
      folder: a new or empty one.

    Raises:
      FileExistsError: for a folder that holds something.
      ValueError: for a model without additions, with several ranks, or of GPT-2, which has its queries, keys
        and values in one tensor.

    Example:
      >>> model = mm.modules.LM(mm.modules.LMConfig(layers=1), rngs=nnx.Rngs(0))
      >>> save_adapter(mm.modules.lora(model, rank=2), "adapter")
      >>> sorted(file.name for file in Path("adapter").iterdir())
      ['adapter_config.json', 'adapter_model.safetensors']
    """
    target = _new(folder)
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    tensors: dict[str, np.ndarray] = {}
    settings, names = set(), set()
    for path, pieces in pieces_of(model).items():
        if (*path[:-1], "lora_a") not in variables or path[-1] != "kernel":
            continue
        layer = _layer(model, path)
        settings.add((layer.rank, layer.alpha))
        additions = [("lora_A", "lora_a"), ("lora_B", "lora_b")]
        rows = {name: _rows(variables[*path[:-1], ours]) for name, ours in additions}
        for piece in pieces:
            if not piece.transposed:
                name = ".".join(map(str, path))
                raise ValueError(f"PEFT has no adapter for {name}: in {piece.tensor} it is not a layer")
            stem = piece.tensor.removesuffix(".weight")
            names.add(stem.rpartition(".")[2])
            for name, row_of in rows.items():
                tensor = f"base_model.model.{stem}.{name}.weight"
                tensors[tensor] = np.ascontiguousarray(row_of(piece.index).T)
    if len(settings) != 1:
        raise ValueError(f"PEFT has one rank and alpha for all layers; this model has {sorted(settings)}")
    ((rank, alpha),) = settings
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, bias="none")
    config |= dict(target_modules=sorted(names), base_model_name_or_path=model.source, fan_in_fan_out=False)
    with done_by_first("write the adapter") as first:
        if first:
            target.mkdir(parents=True, exist_ok=True)
            _write(tensors, target / "adapter_model.safetensors")
            (target / "adapter_config.json").write_text(_json(config))


def _write(tensors: dict[str, np.ndarray], file: FilePath) -> None:
    file.touch()
    mode = file.stat().st_mode  # that of new files here: safetensors lets nobody but the owner read its own
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"cannot write {file.name}: {error}") from error


def _new(folder: str | FilePath) -> FilePath:
    """A folder to write. Raises FileExistsError if it holds something; OSError in the other processes."""
    target = FilePath(folder)
    with done_by_first("look at the folder") as first:
        if first and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileExistsError(f"{target} is there and is not empty: name a new folder")
    return target


def _layer(model: LM, path: Path) -> Any:
    """The layer that a kernel is of."""
    layer: Any = model
    for key in path[:-1]:
        layer = layer[key] if isinstance(key, int) else getattr(layer, key)
    return layer


def _config(model: LM, source: Any, dtypes: Mapping[str, np.dtype]) -> dict[str, Any]:
    """The fields of `config.json`: those of the source, but for what the model has changed, or the model's
    own; and the dtype of most weights."""
    written = jnp.dtype(max(dtypes.values(), key=list(dtypes.values()).count)).name
    if source is None:
        return write_config(model.config) | {"dtype": written}
    found, theirs = read_json_object(FilePath(source) / CONFIG), read_config(source)
    if jnp.dtype(theirs.param_dtype).name != written:
        found |= {"torch_dtype" if "torch_dtype" in found else "dtype": written}
    before, now = write_config(theirs), write_config(model.config)
    changed = {name for name in now if name != "dtype" and now[name] != before.get(name)}
    if "rope_parameters" in changed:  # older files say the same in other fields
        found = {name: value for name, value in found.items() if name not in OLD_ROPE}
    return found | {name: now[name] for name in changed}


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _kept_dtypes(model: LM, pieces: Mapping[Path, tuple[Piece, ...]]) -> dict[str, np.dtype]:
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    return {p.tensor: variables[path].get_raw_value().dtype for path, own in pieces.items() for p in own}


def _files(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> dict[str, str]:
    """The file of each tensor, where no folder says it."""
    numbers, number, filled = {}, 1, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtypes[name].itemsize
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    if number == 1:
        return dict.fromkeys(shapes, ONE_FILE)
    return {name: f"model-{n:05}-of-{number:05}.safetensors" for name, n in numbers.items()}


def _tensors(
    model: LM,
    pieces: Mapping[Path, tuple[Piece, ...]],
    names: Sequence[str],
    dtypes: Mapping[str, np.dtype],
) -> dict[str, np.ndarray]:
    """The tensors of some names, in host memory. Each Variable is read once."""
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    parts: dict[str, list[tuple[int, np.ndarray]]] = {name: [] for name in names}
    for path, all_pieces in pieces.items():
        own = [piece for piece in all_pieces if piece.tensor in parts]
        if not own:
            continue
        row_of = _rows(variables[path])
        has_addition = (*path[:-1], "lora_a") in variables and path[-1] == "kernel"
        addition_of = _addition(model, path, variables) if has_addition else None
        for piece in own:
            row = row_of(piece.index)
            if addition_of is not None:
                row = row + addition_of(piece.index).astype(row.dtype)
            parts[piece.tensor].append((piece.start, row.T if piece.transposed else row))
    in_order = {name: [row for _, row in sorted(found, key=lambda f: f[0])] for name, found in parts.items()}
    return {
        name: np.ascontiguousarray(np.concatenate(rows, axis=-1) if len(rows) > 1 else rows[0], dtypes[name])
        for name, rows in in_order.items()
    }


def _addition(
    model: LM, path: Path, variables: Mapping[Path, nnx.Variable]
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """From an index into a kernel to what the low-rank addition of its layer adds there, float32."""
    layer = _layer(model, path)
    a, b = (_rows(variables[*path[:-1], name]) for name in ("lora_a", "lora_b"))
    scale = layer.alpha / layer.rank
    return lambda index: scale * (a(index).astype(np.float32) @ b(index).astype(np.float32))


def _rows(variable: nnx.Variable) -> Callable[[tuple[int, ...]], np.ndarray]:
    """From an index into the first dimensions to that part of a Variable in host memory; in several
    processes of all of them, which each call this."""
    x = variable.get_raw_value()
    if jax.process_count() == 1:
        return functools.partial(held_row, x)
    whole = np.asarray(fetch(x))
    return lambda index: whole[index].copy()  # a view would keep all of it
