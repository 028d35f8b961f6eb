"""Generation: tokens from a language model, one after the other, across the stages it is placed on."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.sampling import check_choice, filter_logits
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
    rng: jax.Array | None = None,
    eos: int | None = None,
    lengths: Any = None,
    capacity: int | None = None,
    on_token: Callable[[np.ndarray], None] | None = None,
) -> jax.Array:
    """The tokens that a language model generates after a prompt.

    One call of `mm.jit` reads the prompt, and another one makes each token. They are compiled once for each
    model structure, batch, prompt length and capacity, also over several calls of `generate`. The KV cache of
    a layer stays on the mesh of that layer and is overwritten there; tokens are chosen on the mesh of the
    logits. A placed model is used where it is: call this while its MultiMesh is current, as for any function
    of `mm.jit`. Dropout stays as it is set: `model.eval()` switches it off.

    Args:
      model: an `LM`, or anything with these two: `model.init_cache(batch, capacity)`, a pytree of empty
        caches, and `model(tokens, cache=cache) -> (logits [batch, length, vocab], next cache)`, for several
        tokens at once and for one. The length of a `KVCache` is the number of tokens before `tokens`.
      prompt: int [batch, length], at least one token.
      max_new_tokens: how many to make for each row.
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: tokens are drawn from the `top_k` likeliest.
      top_p: tokens are drawn from the likeliest ones whose probabilities sum up to `top_p` (nucleus sampling,
        arXiv:1904.09751), after `top_k`.
      rng: a key. Needed to draw, that is with a temperature above 0.
      eos: the token that ends a row: after it the row is filled up with it.
      lengths: int [batch], how many tokens of each row of the prompt count; the others, on the right, are
        padding. All caches must be `KVCache`s. Default: all.
      capacity: tokens that a row of the cache has room for, at least length + max_new_tokens - 1; to give the
        same for several calls saves compiling. Default: that.
      on_token: called with the tokens of each step, int32 [batch], when the next one is under way: to show
        text as it comes. In several processes each must give it.

    Returns:
      int32 [batch, max_new_tokens], on the mesh that makes the logits.

    Raises:
      ValueError: arguments out of range or that do not go together, a row of no tokens, or a token below 0 or
        beyond the `model.config.vocab` of a model that has it.
      TypeError: a prompt that is not of integers; a model without `init_cache`; lengths for a model with
        other caches than `KVCache`s.

    Example:
      >>> model = LM(LMConfig(layers=2), rngs=nnx.Rngs(0))
      >>> generate(model, jnp.array([[1, 2, 3]]), 5).shape
      (1, 5)
    """
    prompt = np.asarray(prompt)
    temperature = float(temperature)  # these may be arrays of one number
    top_k, eos = (None if n is None else operator.index(n) for n in (top_k, eos))
    _check_prompt(model, prompt, lengths)
    _check_tokens(model, prompt, lengths, eos)
    check_choice(temperature, top_k, top_p, rng)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: generate at least one token")
    needed = prompt.shape[1] + max_new_tokens - 1
    capacity = needed if capacity is None else capacity
    if capacity < needed:
        raise ValueError(
            f"capacity={capacity} is too small for a prompt of {prompt.shape[1]} tokens and "
            f"{max_new_tokens} new ones: give at least {needed}"
        )
    choice: dict[str, Any] = dict(
        key=jax.random.key(0) if rng is None else rng,
        temperature=np.float32(temperature or 1),
        top_p=None if top_p in (None, 1) else np.float32(top_p),
        top_k=top_k,
        greedy=temperature == 0,
        eos=eos,
    )
    held = np.int32(prompt.shape[1] - 1) if lengths is None else np.asarray(lengths, np.int32) - 1
    token, cache = _prefill(model, prompt.astype(np.int32), held, capacity=capacity, **choice)
    tokens = [token]
    shown = lambda token: on_token and on_token(np.asarray(fetch(token))[:, 0])
    for step in range(1, max_new_tokens):
        # One step behind, so that devices do not wait for the host; processes must all take as many steps.
        if eos is not None and step > 1 and jax.process_count() == 1 and _is_all(tokens[-2], eos):
            tokens += [token] * (max_new_tokens - step)
            break
        token, cache = _decode(model, cache, token, held + np.int32(step), np.uint32(step), **choice)
        shown(tokens[-1])
        tokens.append(token)
    shown(tokens[-1])
    return _join(*tokens)


def _read(model: Any, prompt: Any, held: Any, *, capacity: int, **choice: Any) -> Any:
    """Reads a prompt [batch, length] into a new cache and chooses the token after it.

    The last token goes through the model on its own: of all others no logits are needed, and none are made.
    """
    cache, last = model.init_cache(len(prompt), capacity), prompt[:, -1:]
    if prompt.shape[1] > 1:
        _, cache = model(prompt[:, :-1], cache=cache)
    if held.ndim:
        last = jnp.take_along_axis(prompt, held[:, None], axis=1)
    return _step(model, cache, last, held, 0, **choice)


def _step(
    model: Any,
    cache: Any,
    token: Any,
    held: Any,
    step: Any,
    *,
    key: Any,
    temperature: Any,
    top_p: Any,
    top_k: int | None,
    greedy: bool,
    eos: int | None,
) -> Any:
    """(the token [batch, 1] after `token`, the next cache without its lengths).

    `held`, a scalar or [batch], is the number of tokens in the caches. It is an argument because the caller
    knows it: so no stage computes it, returns it and has to place it.
    """
    logits, cache = model(token, cache=_map(_with_length, cache, held))
    logits = logits[:, -1:]
    if greedy:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        logits = filter_logits(logits, temperature, top_k, top_p)
        chosen = jax.random.categorical(jax.random.fold_in(key, step), logits)
    if eos is not None:
        chosen = jnp.where((token == eos) & (step > 0), eos, chosen)  # a prompt may end with it
    return chosen.astype(jnp.int32), _map(_without_length, cache)


# Module-level, so that equal calls use what earlier ones compiled.
_STATIC = ("top_k", "greedy", "eos")
_prefill = jit(_read, static_argnames=("capacity", *_STATIC))
_decode = jit(_step, static_argnames=_STATIC, donate_argnames="cache")
_join = jit(lambda *tokens: jnp.concatenate(tokens, axis=1))


def _map(fun: Callable[..., KVCache], cache: Any, *args: Any) -> Any:
    """`fun` of every KVCache in a pytree; what else is in it stays."""
    return jax.tree.map(lambda c: fun(c, *args) if _is_kv_cache(c) else c, cache, is_leaf=_is_kv_cache)


def _is_kv_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def _with_length(cache: KVCache, length: jax.Array) -> KVCache:
    layers = cache.key.shape[:-4]  # the leading axes in a cache of scanned layers
    return cache.with_length(jnp.broadcast_to(length, (*layers, *length.shape)))


def _without_length(cache: Any) -> Any:
    return dataclasses.replace(cache, length=None)


def _is_all(tokens: jax.Array, eos: int) -> bool:
    return bool((np.asarray(tokens) == eos).all())


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
    others = [c for c in jax.tree.leaves(cache, is_leaf=_is_kv_cache) if not _is_kv_cache(c)]
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


def _check_tokens(model: Any, prompt: np.ndarray, lengths: Any, eos: int | None) -> None:
    vocab: Any = getattr(getattr(model, "config", None), "vocab", None)
    known = isinstance(vocab, int)
    counted = prompt
    if lengths is not None:
        counted = prompt[np.arange(prompt.shape[1]) < np.asarray(lengths)[:, None]]
    for name, token in (("prompt", counted.min()), ("prompt", counted.max()), ("eos", eos)):
        if token is not None and (token < 0 or (known and token >= vocab)):
            raise ValueError(
                f"{name}= has the token {token}, and those of {type(model).__name__} are "
                + (f"from 0 to {vocab - 1}" if known else "0 or above")
            )
