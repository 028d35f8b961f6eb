"""Generation: tokens from a language model, one after the other, across the stages it is placed on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmnnx.modules.decode import Group, decode
from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.sampling import check_choice
from mmnnx.mpmd.distributed.fetch import fetch
from mmnnx.mpmd.jit.jit import jit


def generate(
    model: nnx.Module,
    prompt: Any,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    eos: int | Sequence[int] | None = None,
    lengths: Any = None,
    capacity: int | None = None,
    in_flight: int = 1,
    prefill_chunk: int | None = None,
    on_token: Callable[[np.ndarray], None] | None = None,
) -> jax.Array:
    """The tokens that a language model generates after a prompt.

    One call of `mm.jit` reads the prompt, and another one makes each token. They are compiled once for each
    model structure, batch, prompt length and capacity, also over several calls of `generate`. The KV cache of
    a layer stays on the mesh of that layer and is overwritten there; tokens are chosen on the mesh of the
    logits. A placed model is used where it is: call this while its MultiMesh is current, as for any function
    of `mm.jit`. Dropout stays as it is set: `model.eval()` switches it off.

    A token goes through all stages before the next one of its row can begin, so one batch keeps one stage
    busy. `in_flight=` divides the rows into groups that follow each other through the stages (a pipelined
    decode): with as many groups as stages none of them waits. It pays where the time of a stage grows with
    the rows; with few rows, most of that time goes into reading the weights, once for each group.

    Args:
      model: an `LM`, or anything with these two: `model.init_cache(batch, capacity)`, a pytree of empty
        caches, and `model(tokens, cache=cache) -> (logits [batch, length, vocab], next cache)`, for several
        tokens at once and for one. The length of a `KVCache` is the number of tokens before `tokens`.
      prompt: int [batch, length], at least one token.
      max_new_tokens: how many to make for each row.
      temperature: logits are divided by it, in float32; 0 takes the likeliest token.
      top_k: tokens are drawn from the `top_k` likeliest.
      top_p: tokens are drawn from the likeliest ones whose probabilities sum up to `top_p` (nucleus sampling,
        arXiv:1904.09751), after `top_k`.
      key: needed to draw, that is with a temperature above 0. The draws of a row depend on its number
        in the batch, and not on the rows beside it.
      eos: the token that ends a row, or several of which each does: after it the row is filled up with it.
      lengths: int [batch], how many tokens of each row of the prompt count; the others, on the right, are
        padding. All caches must be `KVCache`s. Default: all.
      capacity: tokens that a row of the cache has room for, at least length + max_new_tokens - 1; to give the
        same for several calls saves compiling. Default: that.
      in_flight: groups of rows that are under way at once; it divides the batch.
      prefill_chunk: the prompt is read in parts of so many tokens, which follow each other through the stages
        too, and need less memory than all at once. Default: all at once.
      on_token: called with the tokens of each step, int32 [batch], when the next one is under way: to show
        text as it comes. In several processes each must give it.

    Returns:
      int32 [batch, max_new_tokens], on the mesh that makes the logits; with several groups in flight on that
      which reads tokens.

    Raises:
      ValueError: arguments out of range or that do not go together, a row of no tokens, or a token below 0 or
        beyond the `model.config.vocab` of a model that has it; more tokens than its `config.positions`.
      TypeError: a prompt that is not of integers; a model without `init_cache`; lengths for a model with
        other caches than `KVCache`s.

    Example:
      >>> model = LM(LMConfig(layers=2), rngs=nnx.Rngs(0))
      >>> generate(model, jnp.array([[1, 2, 3]]), 5).shape
      (1, 5)
    """
    try:
        prompt = np.asarray(prompt)
    except ValueError:  # rows of several lengths
        raise ValueError("the rows of a prompt are of one length: pad them, and give lengths=") from None
    temperature = float(temperature)  # these may be arrays of one number
    top_k = None if top_k is None else operator.index(top_k)
    ends = () if eos is None else tuple(map(operator.index, np.ravel(eos)))
    _check_prompt(model, prompt, lengths)
    _check_tokens(model, prompt, lengths, ends)
    check_choice(temperature, top_k, top_p, key)
    batch, length = prompt.shape
    capacity = _check_sizes(batch, length, max_new_tokens, capacity, in_flight, prefill_chunk)
    _check_positions(model, length, max_new_tokens)
    choice: dict[str, Any] = dict(
        key=jax.random.key(0) if key is None else key,
        temperature=np.float32(temperature or 1),
        top_p=None if top_p in (None, 1) else np.float32(top_p),
        top_k=top_k,
        greedy=temperature == 0,
        eos=ends,
    )
    prompt = prompt.astype(np.int32)
    # One number for all rows where it can be: so none has to be looked up.
    held: Any = np.int32(length - 1) if lengths is None else np.asarray(lengths, np.int32) - 1
    groups = [
        Group(prompt[rows], held[rows] if held.ndim else held, rows)
        for rows in np.split(np.arange(batch, dtype=np.int32), in_flight)
    ]

    def show(step: int) -> None:
        if on_token is not None:
            last = [group.tokens[min(step, len(group.tokens) - 1)] for group in groups]
            on_token(np.concatenate([fetch(token) for token in last])[:, 0])

    for step, _ in zip(range(max_new_tokens), decode(model, groups, capacity, prefill_chunk, choice)):
        if step:
            show(step - 1)  # one step behind, so that devices do not wait for the host
    tokens = [group.tokens for group in groups]
    show(max(map(len, tokens)) - 1)
    return _join([[*own, *own[-1:] * (max_new_tokens - len(own))] for own in tokens])


# Module-level, so that equal calls use what earlier ones compiled.
_join = jit(lambda tokens: jnp.concatenate([jnp.concatenate(own, axis=1) for own in tokens]))


def _check_sizes(
    batch: int, length: int, new: int, capacity: int | None, in_flight: int, chunk: int | None
) -> int:
    """The capacity of the caches; refuses numbers that will not do."""
    if new < 1:
        raise ValueError(f"max_new_tokens={new}: generate at least one token")
    needed = length + new - 1
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"capacity={capacity} is too small for a prompt of {length} tokens and {new} new ones: give at "
            f"least {needed}"
        )
    if in_flight < 1 or batch % in_flight:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        raise ValueError(
            f"in_flight={in_flight} groups do not divide the {batch} rows of the prompt: {fitting} do"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk={chunk}: at least one token is read at once")
    return needed if capacity is None else capacity


def _check_positions(model: Any, length: int, new: int) -> None:
    """Refuses more tokens than a model with learned positions has."""
    positions: Any = getattr(getattr(model, "config", None), "positions", None)
    if isinstance(positions, int) and length + new - 1 > positions:
        raise ValueError(
            f"a prompt of {length} tokens and {new} new ones need {length + new - 1} positions, and "
            f"{type(model).__name__} has {positions} (model.config.positions)"
        )


def _check_prompt(model: Any, prompt: np.ndarray, lengths: Any) -> None:
    if not hasattr(model, "init_cache"):
        raise TypeError(
            f"generate: {type(model).__name__} has no init_cache(batch, capacity), and its call no cache="
        )
    if not np.issubdtype(prompt.dtype, np.integer):
        raise TypeError(f"a prompt is made of integers [batch, length], not of {prompt.dtype}")
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"a prompt is int [batch, length], with at least one token in each row; it is {prompt.shape}"
        )
    if lengths is None:
        return
    lengths = np.asarray(lengths)
    cache = jax.eval_shape(lambda: model.init_cache(*prompt.shape))
    is_kv_cache = lambda x: isinstance(x, KVCache)
    others = [c for c in jax.tree.leaves(cache, is_leaf=is_kv_cache) if not is_kv_cache(c)]
    if others:
        raise TypeError(
            f"lengths= takes padding out of KVCaches, and the caches of {type(model).__name__} also hold "
            f"{type(others[0]).__name__}: give rows of one length, without lengths="
        )
    if lengths.shape != prompt.shape[:1] or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"lengths= is int [{len(prompt)}], one for each row of the prompt; it is "
            f"{lengths.dtype}{list(lengths.shape)}"
        )
    if lengths.min() < 1 or lengths.max() > prompt.shape[1]:
        raise ValueError(
            f"lengths= are from 1 to {prompt.shape[1]}, the length of the prompt; they are {lengths.tolist()}"
        )


def _check_tokens(model: Any, prompt: np.ndarray, lengths: Any, ends: Sequence[int]) -> None:
    vocab: Any = getattr(getattr(model, "config", None), "vocab", None)
    known = isinstance(vocab, int)
    counted = prompt
    if lengths is not None:
        counted = prompt[np.arange(prompt.shape[1]) < np.asarray(lengths)[:, None]]
    for name, token in (
        ("prompt", counted.min()),
        ("prompt", counted.max()),
        *(("eos", end) for end in ends),
    ):
        if token < 0 or (known and token >= vocab):
            raise ValueError(
                f"{name}= has the token {token}, and those of {type(model).__name__} are "
                + (f"from 0 to {vocab - 1}" if known else "0 or above")
            )
