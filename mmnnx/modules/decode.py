"""Decoding: the tokens of some rows, one after the other, with KV caches that stay on their meshes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.sampling import filter_logits
from mmnnx.mpmd.jit.jit import jit


def decode(
    model: Any,
    prompt: np.ndarray,
    held: np.ndarray,
    rows: np.ndarray,
    capacity: int,
    chunk: int | None,
    choice: dict[str, Any],
) -> Iterator[jax.Array]:
    """The tokens [rows, 1] of some rows of a batch, step after step; it ends when each row has met eos.

    The last token of the prompt goes through the model on its own, as a new one does: of all others no logits
    are needed, and none are made.

    Args:
      model, capacity, chunk: as in `generate`.
      prompt: int32 [rows, length].
      held: int32, a scalar or [rows], the tokens before the last one that counts.
      rows: int32 [rows], their numbers in the batch.
      choice: how a token is chosen, as `_step` takes it.
    """
    before, cache = prompt[:, :-1], None
    for start in range(0, before.shape[1], size := chunk or prompt.shape[1]):
        part = before[:, start : start + size]
        cache = _prefill(model, cache, part, np.int32(start), capacity=capacity)
    token = np.take_along_axis(prompt, np.broadcast_to(held, len(prompt))[:, None], axis=1)
    past = None
    for step in itertools.count():
        token, cache = _decode(
            model, cache, token, held + np.int32(step), np.uint32(step), rows, capacity=capacity, **choice
        )
        yield token
        # Looked at one step late, so that devices do not wait for the host. Processes take equal steps.
        if past is not None and jax.process_count() == 1 and _is_all(past, choice["eos"]):
            return
        past = token


def _is_all(tokens: jax.Array, eos: int | None) -> bool:
    return eos is not None and bool((np.asarray(tokens) == eos).all())


def _extend(model: Any, cache: Any, tokens: Any, start: Any, *, capacity: int) -> Any:
    """The cache, a new one if None, with tokens [rows, length] at `start`, without its lengths."""
    cache = model.init_cache(len(tokens), capacity) if cache is None else cache
    _, cache = model(tokens, cache=_map(_with_length, cache, start))
    return _map(_without_length, cache)


def _step(
    model: Any,
    cache: Any,
    token: Any,
    held: Any,
    step: Any,
    rows: Any,
    *,
    capacity: int,
    key: Any,
    temperature: Any,
    top_p: Any,
    top_k: int | None,
    greedy: bool,
    eos: int | None,
) -> Any:
    """(the token [rows, 1] after `token`, the next cache without its lengths).

    `held`, a scalar or [rows], is the number of tokens in the caches. It is an argument because the caller
    knows it: so no stage computes it, returns it and has to place it.
    """
    cache = model.init_cache(len(token), capacity) if cache is None else cache
    logits, cache = model(token, cache=_map(_with_length, cache, held))
    logits = logits[:, -1]
    if greedy:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        logits = filter_logits(logits, temperature, top_k, top_p)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, step), rows)
        chosen = jax.vmap(jax.random.categorical)(keys, logits)
    chosen = chosen[:, None]
    if eos is not None:
        chosen = jnp.where((token == eos) & (step > 0), eos, chosen)  # a prompt may end with it
    return chosen.astype(jnp.int32), _map(_without_length, cache)


# Module-level, so that equal calls use what earlier ones compiled.
_prefill = jit(_extend, static_argnames="capacity", donate_argnames="cache")
_decode = jit(_step, static_argnames=("capacity", "top_k", "greedy", "eos"), donate_argnames="cache")


def _map(fun: Callable[..., KVCache], cache: Any, *args: Any) -> Any:
    """`fun` of every KVCache in a pytree; what else is in it stays."""
    is_kv_cache = lambda x: isinstance(x, KVCache)
    return jax.tree.map(lambda c: fun(c, *args) if is_kv_cache(c) else c, cache, is_leaf=is_kv_cache)


def _with_length(cache: KVCache, length: jax.Array) -> KVCache:
    layers = cache.key.shape[:-4]  # the leading axes in a cache of scanned layers
    return cache.with_length(jnp.broadcast_to(length, (*layers, *length.shape)))


def _without_length(cache: Any) -> Any:
    return dataclasses.replace(cache, length=None)
