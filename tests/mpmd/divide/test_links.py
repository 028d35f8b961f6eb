"""What an equation computes for the pieces of a value is what it computes for all of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mmnnx as mm
import mmnnx.mpmd.divide.indexing  # rules of their own
from mmnnx.mpmd.divide.values import Cut
from tests.mpmd.divide.compare import assert_same_in_pieces
from tests.slow import grid

L = 8  # layers
CUTS = [Cut(0, (2, 2, 2, 2)), Cut(0, (4, 2, 2))]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


W, V, N = normal(L, 4, 6), normal(L, 4, 6, seed=1), normal(L)
X = normal(3, 4)
BYTES = lax.bitcast_convert_type(W, jnp.uint8)
KEYS = jax.random.split(jax.random.key(3), L)
SQUARE = normal(L, 4, 4) + 3 * jnp.eye(4)


def check(fun: Any, *args: Any, cut: Cut, given: Any = None, wanted: Any = None) -> Any:
    """Runs a function over the pieces of those arguments that have the divided dimension, and compares.

    Args:
      wanted: for all results, or a list with one for each.
    """
    given = [cut if x.ndim and x.shape[0] == L else None for x in args] if given is None else given
    whole = jax.make_jaxpr(lambda *args: jax.tree.leaves(fun(*args)))(*args)
    wanted = wanted if isinstance(wanted, list) else [wanted] * len(whole.out_avals)
    return assert_same_in_pieces(whole, args, given, wanted, 2e-5)


STAYS = {
    "arithmetic": lambda: (lambda w, v: jnp.where(w > v, w * v - 2 / v, jnp.tanh(w) ** 3), W, V),
    "with a whole operand": lambda: (lambda w, v: w + lax.stop_gradient(v[0]), W, V),
    "a number for each layer": lambda: (lambda w, n: w * n[:, None, None], W, N),
    "casts": lambda: (lambda w: w.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.int32), W),
    "clip": lambda: (lambda w: jnp.clip(w, -0.5, 0.5), W),
    "transpose": lambda: (lambda w: jnp.transpose(w, (2, 0, 1)), W),
    "reshape": lambda: (lambda w: w.reshape(L, 24), W),
    "reshape into pairs": lambda: (lambda w: w.reshape(L // 2, 2, 4, 6), W),
    "reshape into one dimension": lambda: (lambda w: w.reshape(L * 4, 6), W),
    "reshape and back": lambda: (lambda w: w.reshape(L // 2, 2, 24).reshape(L, 4, 6), W),
    "squeeze": lambda: (lambda w: jnp.squeeze(w[:, None], 1), W),
    "sums of each": lambda: (lambda w: (w.sum((1, 2)), w.max(1), jnp.argmax(w, 2), w.prod(1)), W),
    "softmax": lambda: (lambda w: jax.nn.softmax(w, axis=1), W),
    "cumulative": lambda: (lambda w: (jnp.cumsum(w, 1), jnp.cumprod(w, 2)), W),
    "sort": lambda: (lambda w: (jnp.sort(w, 1), jnp.argsort(w, 2)), W),
    "top k": lambda: (lambda w: lax.top_k(w, 2), W),
    "concatenate": lambda: (lambda w, v: jnp.concatenate([w, v], axis=1), W, V),
    "stack": lambda: (lambda w, v: jnp.stack([w, v], axis=1), W, V),
    "pad": lambda: (lambda w: jnp.pad(w, ((0, 0), (1, 2), (0, 1))), W),
    "fft": lambda: (lambda w: (jnp.fft.fft(w).real, jnp.fft.irfft(jnp.fft.rfft(w))), W),
    "split": lambda: (lambda w: jnp.split(w, 2, axis=1), W),
    "slice": lambda: (lambda w: w[:, 1:3, ::2], W),
    "reverse": lambda: (lambda w: w[:, ::-1], W),
    "dynamic slice": lambda: (lambda w, i: lax.dynamic_slice_in_dim(w, i, 2, axis=1), W, jnp.int32(1)),
    "dynamic update": lambda: (
        lambda w, v, i: lax.dynamic_update_slice_in_dim(w, v[:, :1], i, axis=1),
        W,
        V,
        jnp.int32(1),
    ),
    "gather": lambda: (lambda w, i: w[:, i], W, jnp.array([0, 2, 1])),
    "gather of each": lambda: (
        lambda w: jnp.take_along_axis(w, jnp.argsort(w, axis=1), axis=1),
        W,
    ),
    "scatter": lambda: (lambda w: w.at[:, 1].set(0.0).at[:, :, 2].add(1.0), W),
    "other scatters": lambda: (lambda w: w.at[:, 1].max(0.0).at[:, 2].multiply(3.0).at[:, :, 2].min(1.0), W),
    "bytes of each": lambda: (lambda w: lax.bitcast_convert_type(w, jnp.uint8), W),
    "of bytes": lambda: (lambda b: lax.bitcast_convert_type(b, jnp.float32), BYTES),
    "bits of each": lambda: (lambda w: lax.bitcast_convert_type(w, jnp.int32), W),
    "matrices of each": lambda: (lambda w, v: jnp.einsum("lij,lkj->lik", w, v), W, V),
    "matrices with one": lambda: (lambda w, x: jnp.einsum("bi,lij->lbj", x, W * w), W, X),
    "vmap": lambda: (lambda w, v: jax.vmap(lambda w, v: jnp.linalg.norm(w @ v.T))(w, v), W, V),
    "decompositions": lambda: (
        lambda s: (jnp.linalg.cholesky(s @ jnp.swapaxes(s, 1, 2)), jnp.linalg.qr(s)[1]),
        SQUARE,
    ),
    "random numbers": lambda: (jax.vmap(lambda k: jax.random.normal(k, (3, 2))), KEYS),
    "keys": lambda: (jax.vmap(lambda k: jax.random.fold_in(jax.random.split(k)[0], 7)), KEYS),
    "key data": lambda: (lambda k: jax.random.wrap_key_data(jax.random.key_data(k) + 1), KEYS),
    "barrier": lambda: (lambda w, x: lax.optimization_barrier((w, x, w + 1)), W, X),
    "reversed layers": lambda: (lambda w: w[::-1], W),
    "layers behind layers": lambda: (lambda w, v: jnp.concatenate([w, v]), W, V),
    "some layers": lambda: (lambda w: w[1:7], W),
    "every second layer": lambda: (lambda w: w[1::2], W),
}
COMBINES = {
    "sum": lambda: (lambda w: w.sum(), W),
    "reductions": lambda: (lambda w: (w.max(0), w.min(), (w > 0).all(), (w > 9).any(), w.prod(0)), W),
    "mean": lambda: (lambda w: w.mean(0), W),
    "global norm": lambda: (lambda w, n: jnp.sqrt((w**2).sum() + (n**2).sum()), W, N),
    "contraction": lambda: (lambda w, n: jnp.einsum("l,lij->ij", n, w), W, N),
    "one layer": lambda: (lambda w: (w[3], w[-1], lax.dynamic_index_in_dim(w, 5)), W),
    "no layer": lambda: (lambda w: w[3:3].sum(), W),
}


@pytest.mark.parametrize("name, cut", grid(list(STAYS), CUTS, step=6))
def test_it_stays_in_pieces(name, cut):
    fun, *args = STAYS[name]()
    _, made = check(fun, *args, cut=cut)
    assert all(c is not None for c in made[:1])


@pytest.mark.parametrize("name, cut", grid(list(COMBINES), CUTS))
def test_pieces_are_combined(name, cut):
    fun, *args = COMBINES[name]()
    _, made = check(fun, *args, cut=cut)
    assert made[0] is None


def test_another_dimension():
    cut = Cut(2, (2, 3, 1))
    _, made = check(lambda w, x: jnp.einsum("bi,lij->lbj", x, w) * 2, W, X, cut=cut, given=[cut, None])
    assert made == [cut]
    _, made = check(lambda w: jnp.einsum("lij,lkj->lik", w, w), W, cut=cut, given=[cut])
    assert made == [None]


def test_what_is_drawn_for_a_whole_stack_is_drawn_in_pieces():
    """No piece needs more than the keys of all layers; not even zeros are made for all of them."""

    def make(key):
        keys = jax.random.split(key, L)
        kernel = jax.vmap(lambda k: jax.nn.initializers.truncated_normal()(k, (4, 6)))(keys)
        scanned = lax.scan(lambda c, k: (c, jax.random.uniform(k, (5,))), 0, keys)[1]
        return kernel, jnp.zeros((L, 6)), jnp.ones((L, 1)) * 2, scanned

    cut = CUTS[0]
    eqns, made = check(make, jax.random.key(0), cut=cut, given=[None], wanted=cut)
    assert made == [cut] * 4
    whole = {e.primitive.name for e in eqns for v in e.outvars if v.aval.shape[:1] == (L,)}
    assert whole == {"random_split"}


def test_what_is_divided_otherwise_is_said():
    message = (
        "argument 0 is divided along dimension 0 into pieces of 2, 2, 2, 2, .*dimension 1 into pieces of 2, 2"
    )
    with pytest.raises(mm.PlacementError, match=message):
        check(lambda w: w + 1, W, cut=CUTS[0], wanted=Cut(1, (2, 2)))


def test_rows_go_to_other_pieces():
    eqns, made = check(lambda w: w + 1, W, cut=CUTS[0], wanted=CUTS[1])
    assert made == [CUTS[1]]
    joined = [e for e in eqns if e.primitive.name == "concatenate"]
    assert [v.aval.shape[0] for e in joined for v in e.invars] == [2, 2]  # the others stay as they are
    check(lambda w: ((w[1:] - w[:-1]) ** 2).sum(), W, cut=CUTS[1])
    check(lambda w: w[::2] * w[1::2], W, cut=CUTS[0])
    check(lambda w: jnp.roll(w, 1, axis=0), W, cut=CUTS[0], wanted=CUTS[0])
    check(lambda w, v: w * v, W, V, cut=CUTS[0], given=CUTS)
    both = lambda w: lax.scan(lambda c, rows: (c + rows[0] * rows[1], c), w[0] * 0, (w, w[::-1]))
    check(both, W, cut=CUTS[1])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "part", [slice(0, 4), slice(1, 3), slice(2, 7), slice(3, 4), slice(0, None, 3)], ids=str
)
def test_gradients_of_slices(part, cut):
    _, made = check(jax.grad(lambda w: (w[part] ** 2).sum()), W, cut=cut)
    assert made[0] in (cut, None)


@pytest.mark.parametrize("cut", CUTS)
def test_a_slice_is_not_the_value_that_its_first_piece_is_of(cut):
    def draw(key):
        v = jax.random.normal(key, (L, 4))
        swapped = jnp.concatenate([v[:2], v[4:], v[2:4]])
        return v, jnp.cumsum(swapped, 0), jnp.sort(v[:4], 0), jnp.cumsum(jnp.concatenate([v, v]), 0)

    check(draw, KEYS[0], cut=cut, given=[None], wanted=[cut, None, None, None])


@pytest.mark.parametrize(
    "fun", [lambda w: w[:2], lambda w: jnp.concatenate([w[:2], w[2:]])], ids=["slice", "join"]
)
def test_what_its_own_slices_are_made_of_is_refused(fun):
    with pytest.raises(mm.PlacementError, match="'cumsum' needs all of it in one place"):
        check(lambda w: (fun(w) + 1, jnp.cumsum(w, axis=0)), W, cut=CUTS[0])


def test_strides():
    for cut in CUTS:
        check(lambda w: (w[:, ::2], w[::2], w[::-2], w[1::3]), W, cut=cut)


REFUSED = {
    "sort": lambda w: jnp.sort(w, axis=0),
    "cumsum": lambda w: jnp.cumsum(w, axis=0),
    "dynamic_slice": lambda w: lax.dynamic_index_in_dim(w, w[0, 0, 0].astype(int)),
    "reshape": lambda w: jnp.transpose(w, (1, 0, 2)).reshape(32, 6),
    "dot_general": lambda w: jnp.einsum("li,mi->lm", w[:, 0], w[:, 1]),
    "argmax": lambda w: jnp.argmax(w, axis=0),
}


def test_a_refusal_names_weights_rather_than_keys():
    noise = lambda keys: jax.vmap(lambda key: jax.random.normal(key, (4, 6)))(keys)
    with pytest.raises(
        mm.PlacementError, match="argument 1 is divided between tasks.*'argmin' needs all of it"
    ):
        check(lambda keys, w: jnp.argmin(noise(keys) * w, axis=0), KEYS, W, cut=CUTS[0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_need_it_whole_is_refused(name):
    message = rf"argument 0 is divided between tasks.*'{name}' needs all of it.*test_links.py:\d+ \("
    with pytest.raises(mm.PlacementError, match=message):
        check(REFUSED[name], W, cut=CUTS[0])


def test_one_number_for_each_row_can_be_read_whole():
    """Which model of a population is best, in what order they are, and which beats which."""

    def compare(w):
        scores = jnp.sum(jnp.sin(w), axis=(1, 2))
        return jnp.argmin(scores), jnp.sort(scores), scores[:, None] > scores, jnp.cumsum(scores)

    check(compare, W, cut=CUTS[0])
