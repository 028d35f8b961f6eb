"""Decoding: the tokens of some rows, one after the other, with KV caches that stay on their meshes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.sampling import filter_logits
from mmnnx.mpmd.jit.jit import jit


@dataclasses.dataclass
class Group:
    """Rows of a batch that are decoded together.

    Attributes:
      prompt: int32 [rows, length].
      held: int32, a scalar or [rows], the tokens before the last one that counts.
      rows: int32 [rows], their numbers in the batch.
      tokens: what was made so far, int32 [rows, 1] each.
      cache: of the tokens before the last of them.
    """

    prompt: np.ndarray
    held: np.ndarray
    rows: np.ndarray
    tokens: list[jax.Array] = dataclasses.field(default_factory=list)
    cache: Any = None

    @property
    def last(self) -> Any:
        """The last token of each row, int32 [rows, 1]."""
        if self.tokens:
            return self.tokens[-1]
        return np.take_along_axis(self.prompt, np.broadcast_to(self.held, len(self.prompt))[:, None], axis=1)

    def has_ended(self, eos: tuple[int, ...]) -> bool:
        """Whether each row had met one of eos a step ago, so that no device has to wait for the host."""
        return len(self.tokens) > 1 and bool(np.isin(np.asarray(self.tokens[-2]), eos).all())


def decode(
    model: Any, groups: Sequence[Group], capacity: int, chunk: int | None, choice: dict[str, Any]
) -> Iterator[None]:
    """Makes a token for each row at each step; it ends when each has met one of eos.

    The groups take turns: the next token of one is dispatched when those of all others are on their way. The
    last token of the prompt goes through the model on its own, as a new one does: of all others no logits
    are needed, and none are made.

    Args:
      model, capacity, chunk: as in `generate`.
      groups: the rows; their tokens and caches are updated.
      choice: how a token is chosen, as `_step` takes it.
    """
    for group in groups:
        before = group.prompt[:, :-1]
        for start in range(0, before.shape[1], size := chunk or group.prompt.shape[1]):
            part = before[:, start : start + size]
            group.cache = _prefill(model, group.cache, part, np.int32(start), capacity=capacity)
    make_token = _decode
    for step in itertools.count():
        # Processes take equal steps: none looks at tokens that another may not have.
        ends = choice["eos"] and jax.process_count() == 1
        going_on = [group for group in groups if not (ends and group.has_ended(choice["eos"]))]
        if not going_on:
            return
        for group in going_on:
            args = model, group.cache, group.last, group.held + np.int32(step), np.uint32(step), group.rows
            if step == 0 and len(groups) > 1 and group is groups[0]:
                where, _ = _decode.input_shardings(*args, capacity=capacity, **choice)
                make_token = _decode_to(where[2])
            token, group.cache = make_token(*args, capacity=capacity, **choice)
            group.tokens.append(token)
        yield


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
    eos: tuple[int, ...],
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
    if eos:
        ended = jnp.isin(token, jnp.array(eos))
        chosen = jnp.where(ended & (step > 0), token, chosen)  # a prompt may end with it
    return chosen.astype(jnp.int32), _map(_without_length, cache)


# Module-level, so that equal calls use what earlier ones compiled.
_prefill = jit(_extend, static_argnames="capacity", donate_argnames="cache")
_OPTIONS: dict[str, Any] = dict(
    static_argnames=("capacity", "top_k", "greedy", "eos"), donate_argnames="cache"
)
_decode = jit(_step, **_OPTIONS)


@functools.cache
def _decode_to(home: NamedSharding) -> Any:
    """`_decode` that sends the token to where the model reads it.

    Otherwise the group's next call sends it. That call is dispatched after those of the other groups, and a
    mesh works in the order of dispatch: the first stage would wait until the last has finished all groups.
    """
    return jit(_step, out_shardings=(home, None), **_OPTIONS)


def _map(fun: Callable[..., KVCache], cache: Any, *args: Any) -> Any:
    """`fun` of every KVCache in a pytree; what else is in it stays."""
    is_kv_cache = lambda x: isinstance(x, KVCache)
    return jax.tree.map(lambda c: fun(c, *args) if is_kv_cache(c) else c, cache, is_leaf=is_kv_cache)


def _with_length(cache: KVCache, length: jax.Array) -> KVCache:
    layers = cache.key.shape[:-4]  # the leading axes in a cache of scanned layers
    return cache.with_length(jnp.broadcast_to(length, (*layers, *length.shape)))


def _without_length(cache: Any) -> Any:
    return dataclasses.replace(cache, length=None)
