"""Which tensors of a published checkpoint each Variable of a model consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from flax import nnx

from mmnnx.modules.hf.configs import model_type
from mmnnx.modules.lm import LM
from mmnnx.printable import first_few

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one, that is a part of a Variable.

    Attributes:
      tensor: its name.
      shape: its shape.
      index: which part of the Variable it is: an index into its first dimensions, those of stacked layers and
        of experts; () where it is all of it.
      transposed: whether the tensor is [out, in], as `torch.nn.Linear` keeps it.
      start: where the part begins in the last dimension of the tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    transposed: bool
    start: int = 0


ENDS = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}
ATTENTION = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("attention", "query", "kernel"): "self_attn.q_proj.weight",
    ("attention", "query", "bias"): "self_attn.q_proj.bias",
    ("attention", "key", "kernel"): "self_attn.k_proj.weight",
    ("attention", "key", "bias"): "self_attn.k_proj.bias",
    ("attention", "value", "kernel"): "self_attn.v_proj.weight",
    ("attention", "value", "bias"): "self_attn.v_proj.bias",
    ("attention", "out", "kernel"): "self_attn.o_proj.weight",
    ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
    ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
}
MLP = {
    ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
    ("mlp", "up", "kernel"): "mlp.up_proj.weight",
    ("mlp", "down", "kernel"): "mlp.down_proj.weight",
}
LLAMA = ATTENTION | MLP | {("mlp_norm", "scale"): "post_attention_layernorm.weight"}
EXPERTS = {
    ("mlp", "router", "kernel"): "mlp.gate.weight",
    ("mlp", "gate"): "mlp.experts.{expert}.gate_proj.weight",
    ("mlp", "up"): "mlp.experts.{expert}.up_proj.weight",
    ("mlp", "down"): "mlp.experts.{expert}.down_proj.weight",
}
MIXTRAL = {
    ("mlp", "router", "kernel"): "block_sparse_moe.gate.weight",
    ("mlp", "gate"): "block_sparse_moe.experts.{expert}.w1.weight",
    ("mlp", "up"): "block_sparse_moe.experts.{expert}.w3.weight",
    ("mlp", "down"): "block_sparse_moe.experts.{expert}.w2.weight",
}
GEMMA = (
    ATTENTION
    | MLP
    | {
        ("post_attention_norm", "scale"): "post_attention_layernorm.weight",
        ("mlp_norm", "scale"): "pre_feedforward_layernorm.weight",
        ("post_mlp_norm", "scale"): "post_feedforward_layernorm.weight",
    }
)
GPT2_ENDS = {
    ("embed", "embedding"): "transformer.wte.weight",
    ("positions", "embedding"): "transformer.wpe.weight",
    ("norm", "scale"): "transformer.ln_f.weight",
    ("norm", "bias"): "transformer.ln_f.bias",
    ("head", "kernel"): "lm_head.weight",
}
GPT2 = {
    (*ours, kind): f"{theirs}.{'bias' if kind == 'bias' else 'weight'}"
    for ours, theirs, kinds in [
        (("attention_norm",), "ln_1", ("scale", "bias")),
        (("attention", "query"), "attn.c_attn", ("kernel", "bias")),
        (("attention", "key"), "attn.c_attn", ("kernel", "bias")),
        (("attention", "value"), "attn.c_attn", ("kernel", "bias")),
        (("attention", "out"), "attn.c_proj", ("kernel", "bias")),
        (("mlp_norm",), "ln_2", ("scale", "bias")),
        (("mlp", "up"), "mlp.c_fc", ("kernel", "bias")),
        (("mlp", "down"), "mlp.c_proj", ("kernel", "bias")),
    ]
    for kind in kinds
}
BLOCKS = {
    "mixtral": LLAMA | MIXTRAL,
    "qwen3_moe": LLAMA | EXPERTS,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
}
FUSED = ("query", "key", "value")  # in this order in one tensor of GPT-2

WEIGHTS = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


def pieces_of(model: LM, names: Collection[str] | None = None) -> dict[Path, tuple[Piece, ...]]:
    """The pieces of each parameter of a model, by its path.

    Args:
      model: concrete or abstract.
      names: of the tensors in a checkpoint. Some checkpoints leave out the prefix of all but the head.

    Raises:
      ValueError: for parameters that have no name in the checkpoints of this architecture; names them.
    """
    kind = model_type(model.config)
    variables = nnx.to_flat_state(nnx.state(model, WEIGHTS))
    segments = getattr(model.blocks, "segments", ())
    firsts = dict(enumerate(accumulate(map(len, segments), initial=0)))
    found = {path: _pieces(path, np.shape(v.get_raw_value()), firsts, kind) for path, v in variables}
    if unknown := [".".join(map(str, path)) for path, pieces in found.items() if not pieces]:
        raise ValueError(f"checkpoints of {kind!r} have no name for {first_few(unknown, most=4)}")
    if model.config.tied and "lm_head.weight" in (names or ()):  # the embedding once more
        embedding = found["embed", "embedding"]
        found["embed", "embedding"] = (*embedding, dataclasses.replace(embedding[0], tensor="lm_head.weight"))
    prefix = "transformer." if kind == "gpt2" else "model."
    if names is not None and not any(name.startswith(prefix) for name in names):
        without = lambda piece: dataclasses.replace(piece, tensor=piece.tensor.removeprefix(prefix))
        found = {path: tuple(map(without, pieces)) for path, pieces in found.items()}
    return found


def tensor_shapes(pieces: Mapping[Path, tuple[Piece, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, in the order of the model's parameters."""
    return {piece.tensor: piece.shape for own in pieces.values() for piece in own}


def _pieces(path: Path, shape: tuple[int, ...], firsts: Mapping[int, int], kind: str) -> tuple[Piece, ...]:
    """The pieces of one parameter; none if it has no name. `firsts` has the first layer of each segment."""
    gpt2 = kind == "gpt2"
    if path[0] != "blocks":
        name = (GPT2_ENDS if gpt2 else ENDS).get(path)
        return (_piece(name, path, shape, (), gpt2),) if name else ()
    stacked = path[1] == "segments"
    own = path[4:] if stacked else path[2:]
    name = BLOCKS.get(kind, LLAMA).get(own)
    if name is None:
        return ()
    rows = [((n,), firsts[path[2]] + n) for n in range(shape[0])] if stacked else [((), path[1])]
    experts = [(e,) for e in range(shape[len(rows[0][0])])] if "{expert}" in name else [()]
    prefix = "transformer.h" if gpt2 else "model.layers"
    return tuple(
        _piece(f"{prefix}.{layer}.{name.format(expert=expert and expert[0])}", own, shape, row + expert, gpt2)
        for row, layer in rows
        for expert in experts
    )


def _piece(tensor: str, path: Path, shape: tuple[int, ...], index: tuple[int, ...], gpt2: bool) -> Piece:
    inner = shape[len(index) :]
    if gpt2 and path[0] == "attention" and path[1] in FUSED:
        whole = (*inner[:-1], 3 * inner[-1])
        return Piece(tensor, whole, index, False, FUSED.index(path[1]) * inner[-1])
    of_linear = not gpt2 or path[0] == "head"  # GPT-2's other layers are [in, out]
    transposed = of_linear and len(inner) == 2 and path[-1] != "embedding"
    return Piece(tensor, inner[::-1] if transposed else inner, index, transposed)
