"""mm.microbatch: slices, reductions and carried state; in mm.jit over two meshes, in nnx.jit, and outside any
jit.
"""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, pipeline
from tests.slow import few, grid

RNG = np.random.default_rng(0)
A, B = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
X = RNG.normal(size=(8, 4)).astype(np.float32)


@pytest.fixture(params=["plain", "nnx.jit", "mm.jit", "mm.jit split"])
def run(request):
    """run(f, *args): f applied to arguments, of which A and B are put on two meshes when split."""
    mesh, _ = pipeline(2)

    def call(f, *args, **kwargs):
        if request.param == "plain":
            return f(*args, **kwargs)
        if request.param == "nnx.jit":
            return nnx.jit(f)(*args, **kwargs)
        if request.param == "mm.jit":
            return mm.jit(f)(*args, **kwargs)
        home = {id(A): 0, id(B): 1}
        on_mesh = lambda leaf: (
            jax.device_put(leaf, NamedSharding(mesh.slice(stage=home[id(leaf)]), P()))
            if id(leaf) in home
            else leaf
        )
        with mesh:
            args = jax.tree.map(on_mesh, args, is_leaf=lambda x: isinstance(x, nnx.Module))
            return mm.jit(f)(*args, **kwargs)

    return call


def two_layers(a, b, x):
    return jnp.tanh(x @ a) @ b


def by_hand(f, pieces):
    return [np.asarray(f(piece)) for piece in pieces]


def test_sum_is_the_default(run):
    f = lambda a, b, x: jnp.sum(two_layers(a, b, x), axis=0)
    got = run(mm.microbatch(f, 0, 2, argnum=2), A, B, X)
    np.testing.assert_allclose(
        got, np.sum(by_hand(lambda x: f(A, B, x), np.split(X, 4)), axis=0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("size, schedule", grid([1, 2, 4, 8], ["gpipe", "1f1b", None], step=3))
def test_sizes_and_schedules(run, schedule, size):
    f = jax.value_and_grad(lambda params, x: jnp.sum(two_layers(*params, x) ** 2))
    got = run(mm.microbatch(f, 0, size, argnum=1, schedule=schedule), (A, B), X)
    assert_same(got, f((A, B), X))


@few(3)
@pytest.mark.parametrize("count", [1, 4])
def test_so_many_microbatches(run, count):
    """By their number, the slices are those of the size that it gives."""
    f = lambda x: jnp.sum(x**2, axis=0) * x[0, 0]
    loops = [
        mm.microbatch(f, 0, 8 // count, reduce="concat"),
        mm.microbatch(f, 0, count=count, reduce="concat"),
    ]
    by_size, by_count = (run(lambda a, b, x, loop=loop: loop(x), A, B, X) for loop in loops)
    assert_same(by_count, by_size)


REDUCTIONS = {
    "sum": lambda outs: np.sum(outs, axis=0),
    "mean": lambda outs: np.mean(outs, axis=0),
    "max": lambda outs: np.max(outs, axis=0),
    "last": lambda outs: outs[-1],
    "concat": lambda outs: np.concatenate(outs, axis=0),
}


@few(6)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions(run, reduce):
    got = run(mm.microbatch(two_layers, 0, 2, argnum=2, reduce=reduce), A, B, X)
    expected = REDUCTIONS[reduce](by_hand(lambda x: two_layers(A, B, x), np.split(X, 4)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_reductions_as_a_prefix_tree(run):
    """One name for a whole subtree, another for its neighbour; integers stay integers."""

    def f(a, b, x):
        y = two_layers(a, b, x)
        return {
            "rows": (y, x),
            "stats": {"largest": jnp.max(y), "count": jnp.int32(x.shape[0])},
            "loss": jnp.mean(y),
        }

    reduce = {"rows": "concat", "stats": {"largest": "max", "count": "sum"}, "loss": "mean"}
    got = run(mm.microbatch(f, 0, 2, argnum=2, reduce=reduce), A, B, X)
    y = np.asarray(two_layers(A, B, X))
    expected = {"rows": (y, X), "stats": {"largest": y.max(), "count": np.int32(8)}, "loss": y.mean()}
    assert_same(got, expected)


def test_integers_and_maxima_of_negatives(run):
    """The largest of negative numbers is negative: a maximum does not start from nought."""
    f = lambda a, b, x: (jnp.max(-jnp.abs(x)) - 1.0, jnp.max(-jnp.abs(x).astype(jnp.int32)) - 1)
    got = run(mm.microbatch(f, 0, 2, argnum=2, reduce="max"), A, B, X)
    expected = (np.float32(np.max(-np.abs(X)) - 1.0), np.int32(np.max(-np.abs(X).astype(np.int32)) - 1))
    assert_same(got, expected)


def test_slices_another_dimension_of_a_pytree(run):
    """Every leaf of the sliced argument is cut along `dim`; results are joined along it."""
    tree = {"x": X.T, "more": [np.stack([X.T, -X.T], axis=-1)]}
    f = lambda tree, a: (a @ tree["x"], tree["more"][0][..., 1])
    got = run(mm.microbatch(f, 1, 2, reduce="concat"), tree, A)
    assert_same(got, (A @ X.T, -X.T))


def test_concat_of_scalars_gives_one_entry_a_microbatch(run):
    got = run(
        mm.microbatch(lambda a, b, x: jnp.sum(two_layers(a, b, x)), 0, 2, argnum=2, reduce="concat"), A, B, X
    )
    expected = by_hand(lambda x: jnp.sum(two_layers(A, B, x)), np.split(X, 4))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_one_microbatch_is_the_function_itself(run):
    f = jax.grad(lambda params, x: jnp.mean(two_layers(*params, x) ** 2))
    assert_same(run(mm.microbatch(f, 0, 8, argnum=1), (A, B), X), f((A, B), X))


def test_the_function_is_traced_once(run):
    traces = []

    def f(params, x):
        traces.append(x)
        return jax.value_and_grad(lambda params: jnp.mean(two_layers(*params, x) ** 2))(params)

    run(mm.microbatch(f, 0, 2, argnum=1), (A, B), X)
    assert len(traces) == 1


@few(1)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit, mm.jit])
def test_a_model_that_is_closed_over_in_a_transformation_of_jax(jit):
    """The model is only read, so nothing is written back."""
    model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.arange(16.0).reshape(4, 4)
    f = lambda model, x: (model(x) ** 2).sum()

    @jit
    def gradients(model, x):
        return jax.grad(lambda x: mm.microbatch(f, dim=0, size=2, argnum=1)(model, x))(x)

    np.testing.assert_allclose(gradients(model, x), jax.grad(lambda x: f(model, x))(x), rtol=1e-4)


@pytest.mark.parametrize("change", [False, True])
def test_a_model_that_should_be_an_argument(change):
    """Flax says that it is of another trace; a note says what to do."""
    f = lambda model, x: (model(x) ** 2).sum()

    @mm.jit
    def step(model, x):
        def body(x):
            if change:
                model.kernel[...] = 2 * model.kernel[...]
            return nnx.value_and_grad(f)(model, x)[0]

        return mm.microbatch(body, dim=0, size=2)(x)

    with pytest.raises((ValueError, TraceContextError)) as caught:
        step(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((4, 4)))
    assert any(
        "have to be arguments of it, as in mm.microbatch(lambda model, x" in n for n in caught.value.__notes__
    )


def test_what_the_function_closes_over_is_differentiated():
    """The loop's body is traced ahead of the loop: what it closes over are then tracers from around it."""

    def loss(a):
        return mm.microbatch(lambda x: jnp.mean(two_layers(a, B, x) ** 2), 0, 2)(X)

    whole = lambda a: 4 * jnp.mean(two_layers(a, B, X) ** 2)
    for jit in (lambda f: f, nnx.jit):
        assert_same(jit(jax.value_and_grad(loss))(A), jax.value_and_grad(whole)(A))
    assert_same(jax.vmap(loss)(jnp.stack([A, 2 * A])), jnp.stack([whole(A), whole(2 * A)]))


@few(4)
@pytest.mark.parametrize("reduce", [*REDUCTIONS])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Manual])
def test_where_types_say_how_arrays_are_sharded(kind, reduce):
    """With explicit axes, and in `jax.shard_map`, which checks over which axes values differ."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    loop = mm.microbatch(lambda x: jnp.tanh(x) * jnp.ones_like(x), 0, 2, reduce=reduce)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P(None, "model"))
        if kind is AxisType.Manual:
            loop = jax.shard_map(loop, in_specs=P(None, "model"), out_specs=P(None, "model"))
        got = jax.jit(loop)(x)
    assert got.sharding.spec == P(None, "model")
    np.testing.assert_array_equal(got, mm.microbatch(jnp.tanh, 0, 2, reduce=reduce)(X))


def test_an_error_of_jax_names_the_function():
    """`if` on a traced value: JAX says in which function."""

    def clipped_loss(a, x):
        loss = jnp.mean(x @ a)
        return loss if loss < 1 else jnp.log(loss)

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"clipped_loss at .*test_microbatch.py:"):
        mm.jit(mm.microbatch(clipped_loss, 0, 2, argnum=1))(A, X)


def test_without_jit_the_function_sees_values():
    seen = []

    def f(x):
        seen.append(x)
        return jnp.sum(x)

    with jax.disable_jit():
        total = mm.microbatch(f, 0, 2)(X)
    assert not any(isinstance(x, jax.core.Tracer) for x in seen)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-5)


def test_without_jit_the_function_may_look_at_values():
    model = Counter()
    alone = Counter()

    def f(model, x):
        return jnp.sum(model(x) if float(x.sum()) > -1e9 else x)

    with jax.disable_jit():
        total = mm.microbatch(f, 0, 2, argnum=1)(model, X)
    assert_same((total, nnx.state(model)), (mm.microbatch(plain, 0, 2, argnum=1)(alone, X), nnx.state(alone)))


def plain(model, x):
    return jnp.sum(model(x))


class Counter(nnx.Module):
    """An exponential average and a count: what they hold afterwards depends on the order of microbatches."""

    def __init__(self):
        self.average = nnx.BatchStat(jnp.zeros(4))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.untouched = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        self.average[...] = 0.5 * self.average[...] + jnp.mean(x, axis=0)
        self.count[...] += 1
        return x * self.count[...]


def test_state_is_carried_in_order(run):
    model = Counter()
    got = run(
        lambda model, x: mm.microbatch(lambda m, x: m(x), 0, 2, argnum=1, reduce="concat")(model, x), model, X
    )
    average = np.zeros(4, np.float32)
    for piece in np.split(X, 4):
        average = 0.5 * average + piece.mean(axis=0)
    np.testing.assert_allclose(model.average[...], average, rtol=1e-5)
    assert int(model.count[...]) == 4
    np.testing.assert_allclose(got, X * np.repeat([1, 2, 3, 4], 2)[:, None], rtol=1e-6)
    np.testing.assert_array_equal(model.untouched[...], np.ones(2))


def test_two_arguments_that_share_state(run):
    """The same Variable through two arguments of the loop is one Variable, carried once."""
    model = Counter()

    def f(a, b, x):
        a.count[...] += 1
        b.count[...] += 1
        return jnp.sum(x)

    run(lambda a, b, x: mm.microbatch(f, 0, 2, argnum=2)(a, b, x), model, model, X)
    assert int(model.count[...]) == 8


def test_keyword_arguments_are_constant(run):
    f = lambda x, a, *, shift: x @ a + shift
    got = run(lambda a, x: mm.microbatch(f, 0, 2, reduce="concat")(x, a, shift=2.0), A, X)
    np.testing.assert_allclose(got, X @ A + 2.0, rtol=1e-5, atol=1e-6)


def test_a_loop_within_a_loop(run):
    """A microbatched function inside a microbatched function."""
    inner = mm.microbatch(two_layers, 0, 2, argnum=2, reduce="concat")
    outer = mm.microbatch(lambda a, b, x: jnp.sum(inner(a, b, x) ** 2), 0, 4, argnum=2)
    np.testing.assert_allclose(run(outer, A, B, X), np.sum(np.asarray(two_layers(A, B, X)) ** 2), rtol=1e-5)


def test_differentiated_from_outside(run):
    """The gradient of a microbatched loss is the gradient of the loss."""
    loss = mm.microbatch(lambda params, x: jnp.sum(two_layers(*params, x) ** 2), 0, 2, argnum=1)
    whole = lambda params, x: jnp.sum(two_layers(*params, x) ** 2)
    assert_same(run(jax.grad(loss), (A, B), X), jax.grad(whole)((A, B), X))


# Bad input: said before anything runs


def test_a_batch_with_a_text_in_it():
    with pytest.raises(ValueError, match=r"\['name'\] is 'cats', which has no dimension 0 to slice"):
        mm.microbatch(lambda batch: batch["x"].sum(), 0, 2)({"x": X, "name": "cats"})


@pytest.mark.parametrize(
    "options, batch, message",
    [
        (
            dict(size=3),
            X,
            "size 3 does not divide dimension 0 of the sliced argument, which is 8; 2 or 4 would",
        ),
        (dict(count=3), X, "count 3 does not divide dimension 0 .* which is 8; 2 or 4 would"),
        (dict(count=16), X, "count 16 does not divide .* which is 8; 8 would"),
        (dict(), X, "give size=, .* or count=, .*; this has neither"),
        (dict(size=2, count=4), X, "this has size=2 and count=4"),
        (dict(count=0), X, "count must be a positive int, got 0"),
        (dict(size=16), X, r"16.*8"),
        (dict(size=0), X, "size"),
        (dict(size=-2), X, "size"),
        (dict(size=True), X, "size must be a positive int, got True"),
        (dict(size=2, dim=1.0), X, "dim must be an int, got 1.0"),
        (dict(size=2, argnum=(0,)), X, r"the number of one argument \(.*a tuple or a dict.*got \(0,\)"),
        (dict(size=2, memory_limit=0.5), X, "memory_limit must be a number of bytes, got 0.5"),
        (dict(size=2), {"x": X, "y": X[:6]}, r"(?s)disagree.*'x'.*8.*'y'.*6"),
        (dict(size=2, dim=2), X, r"dimension 2"),
        (dict(size=2), X[:0], "empty: its dimension 0 has size 0"),
        (dict(size=2), {"x": X, "scalar": np.float32(1)}, "scalar"),
        (dict(size=2), {}, "no arrays"),
        (dict(size=2), nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "Linear, whose state is no batch: .* as argnum="),
        (dict(size=2), {"x": X, "rngs": nnx.Rngs(0)}, "is or holds a Rngs"),
        (dict(size=2, schedule="zigzag"), X, r"zigzag.*1f1b.*gpipe"),
        (dict(size=2, reduce="median"), X, r"median.*sum"),
        (dict(size=2, reduce={"nowhere": "sum"}), X, r"'nowhere'.* of fun, which are float32\[\]"),
        (dict(size=2, argnum=3), X, r"argnum"),
        (dict(size=2, schedule="1f1b", interleave=2), X, "interleave=2 means nothing.*'interleaved-1f1b'"),
        (dict(size=2, schedule="zbv", unrolling=2), X, "unrolling=2 means nothing.*'interleaved-1f1b'"),
        (dict(size=2, num_stages="4"), X, "num_stages must be a positive int, got '4'"),
        (dict(size=2, interleave=0), X, "interleave must be a positive int"),
        (dict(size=2, unrolling="loop"), X, "unrolling must be a positive int"),
        (dict(size=2, schedule="custom"), X, "custom_schedule"),
        (dict(size=2, schedule="1f1b", custom_schedule=[["a"]]), X, "custom_schedule"),
        (dict(size=2, custom_schedule=["a"]), X, "each row.*'a'"),
        (dict(size=2, custom_schedule=np.array([["a"]])), X, "each row.*'a'"),
        (dict(size=2, custom_schedule=[[3]]), X, "an entry of custom_schedule.*not 3"),
        (dict(size=2, custom_schedule=[["a", (0, "forward", 0)]]), X, "both names and Actions"),
        (dict(size=2, custom_schedule=[[]]), X, "no entries"),
        (dict(size=2, custom_schedule=[["a"]], interleave=2), X, "interleave means nothing"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_bad_input(jitted, options, batch, message):
    options = {"dim": 0, **options}
    mesh, _ = pipeline(2)
    called = []

    def f(x, a):
        called.append(x)
        return jax.tree.map(lambda leaf: leaf.sum(), x)

    with mesh if jitted else contextlib.nullcontext(), pytest.raises(ValueError, match=message):
        g = mm.microbatch(f, **options)
        (mm.jit(g) if jitted else g)(batch, A)
    assert not called or "reduce" in options


@pytest.mark.parametrize("reduce, is_complex", [("sum", False), ("mean", False), ("max", True)])
def test_reductions_that_mean_nothing(reduce, is_complex):
    """Random keys cannot be added up, and complex numbers have no order."""
    made = (lambda x: x.sum() * 1j) if is_complex else (lambda x: jax.random.key(x.sum().astype(int)))
    with pytest.raises(TypeError, match=rf"reduce='{reduce}' has no meaning for (key<fry>|complex64)"):
        mm.microbatch(made, 0, 2, reduce=reduce)(X)
    assert mm.microbatch(made, 0, 2, reduce="concat")(X).shape == (4,)


@pytest.mark.parametrize(
    "within, spec, words",
    [
        (False, P("data"), r"names axes of a MultiMesh: call the function in `with mesh:`"),
        (True, P("dta"), r"arg_shardings=.*'dta'.* slices float32\[2,4\].*'stage': 2, 'data': 2}; an"),
        (True, P("data", None, None), r"arg_shardings=.* slices float32\[2,4\](?!.*It names axes)"),
        (True, {"x": P("data")}, r"arg_shardings=.* slices float32\[2,4\](?!.*It names axes)"),
    ],
)
def test_shardings_that_do_not_fit_the_slices(within, spec, words):
    mesh, _ = pipeline(2, 2, axes=("data",))
    f = mm.microbatch(lambda x: x.sum(), dim=0, size=2, arg_shardings=spec)
    with mesh if within else contextlib.nullcontext(), pytest.raises(ValueError, match=words):
        mm.jit(f)(X)


@few(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_under_strict_promotion(dtype):
    x = jnp.asarray(np.arange(8).reshape(4, 2), dtype)
    f = mm.microbatch(lambda x: (x * x).sum(), dim=0, size=2, reduce="mean")
    expected = f(x)
    with jax.numpy_dtype_promotion("strict"):
        assert f(x) == expected == (14 + 126) / 2


@few(6)
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("reduce, expected", [("sum", 10), ("mean", 2.5), ("max", 4)])
def test_floats_of_eight_bits(run, dtype, reduce, expected):
    """JAX promotes them to no other type; they are summed in float32."""
    f = mm.microbatch(lambda x: x.max().astype(dtype), dim=0, size=1, reduce=reduce)
    got = run(f, jnp.arange(1.0, 5.0))
    assert got.dtype == dtype and float(got) == expected


def test_results_that_are_empty(run):
    f = mm.microbatch(lambda x: x[:, :0], dim=0, size=2, reduce="concat")
    assert run(f, X).shape == (8, 0)


def test_another_number_of_stages_than_was_asked_for():
    mesh, _ = pipeline(2)
    a, b = (jax.device_put(leaf, NamedSharding(mesh.slice(stage=i), P())) for i, leaf in enumerate((A, B)))
    loss = mm.microbatch(two_layers, 0, 2, argnum=2, reduce="concat", num_stages=3)
    with mesh, pytest.raises(ValueError, match=r"3.*2"):
        mm.jit(loss)(a, b, X)


def test_only_functions_are_looped_over():
    with pytest.raises(TypeError, match="microbatch: fun is a function, not 3"):
        mm.microbatch(3, 0, 2)


def test_placed_state_outside_of_mm_jit():
    mesh, _ = pipeline(2)
    a, b = (jax.device_put(x, NamedSharding(mesh.slice(stage=n), P())) for n, x in enumerate((A, B)))
    for f in (two_layers, mm.jit(two_layers)):
        with mesh, pytest.raises(ValueError, match="incompatible devices") as error:
            mm.microbatch(f, 0, 2, argnum=2)(a, b, X)
        assert any("in a function that mm.jit compiles" in note for note in error.value.__notes__)


def test_a_value_that_is_kept_from_inside():
    mesh, _ = pipeline(2)
    kept = []

    def f(x):
        kept.append(x * 2)
        return kept[0].sum()

    with mesh, pytest.raises(ValueError, match="kept from inside of a loop or mm.microbatch: return it"):
        mm.jit(lambda x: mm.microbatch(f, 0, 2)(x) + kept[0].sum())(X)


class Changed(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.dropout, self.calls = nnx.Dropout(0.5, deterministic=True), 0
        self.parts = nnx.data([nnx.Param(jnp.ones(2)) for _ in range(2)])

    def add(self):
        self.new = nnx.Dict(bias=nnx.Param(jnp.zeros(4)))

    def drop(self):
        del self.linear

    def count(self):
        self.calls += 1

    def swap(self):
        self.parts[1] = nnx.BatchStat(jnp.ones(2))


CHANGES = {
    "add": "argument 0.new (new)",
    "drop": "argument 0.linear (gone)",
    "count": "argument 0.calls from 0 to 1",
    "swap": "argument 0.parts.1 from Param to BatchStat",
    "train": "argument 0.dropout.deterministic from True to False",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_loop_but_arrays_is_named(change):
    def fun(model, x):
        getattr(model, change)()
        return x.sum()

    message = re.escape(
        f"microbatch: the function changes {CHANGES[change]}. Every microbatch must leave all"
    )
    with pytest.raises(ValueError, match=message):
        mm.jit(lambda model, x: mm.microbatch(nnx.value_and_grad(fun), 0, 2, argnum=1)(model, x))(
            Changed(), X
        )


def test_shared_weights_in_bfloat16_are_summed_where_they_are_used():
    """Each mesh has an accumulator of its own, in float32; one array of the weight's shape comes home."""
    mesh, tasks = pipeline(2)
    first = mm.task(lambda w, x: jnp.tanh(x @ w), task=tasks[0])
    second = mm.task(lambda w, x: x @ w.T, task=tasks[1])

    def loss(w, x):
        return (second(w, first(w, x)).astype(jnp.float32) ** 2).mean()

    w = jax.device_put(jnp.eye(16, dtype=jnp.bfloat16), NamedSharding(mesh.slice(stage=0), P()))
    x = jnp.linspace(-1, 1, 128, dtype=jnp.bfloat16).reshape(8, 16)
    grad_fn = mm.microbatch(jax.grad(loss), 0, 2, argnum=1, schedule="1f1b")
    step = mm.jit(lambda w, x: w - grad_fn(w, x), mesh=mesh)
    back = [t for t in step.program(w, x).transfers if t.shape == (16, 16) and t.target == "stage0"]
    assert [t.microbatch for t in back] == [None]
    got = step(w, x)
    assert got.dtype == jnp.bfloat16
    grad = jax.jit(jax.grad(loss))
    grads = sum(grad(w, x[i : i + 2]).astype(jnp.float32) for i in range(0, 8, 2))
    expected = w.astype(jnp.float32) - jax.device_get(grads)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2e-2, atol=1e-2)


@few(1)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.float32])
def test_a_sum_that_is_converted_is_converted_after_it_is_added_up(dtype):
    """Each term, on its mesh, is below one and their sum above: they are not rounded one by one."""
    mesh, _ = pipeline(2)
    parts = [mm.task(lambda w, x: (w * x).sum(), f"t{n}", mesh_slice={"stage": n}) for n in range(2)]

    def total(weights, x):
        return sum(part(w, x) for part, w in zip(parts, weights)).astype(dtype)

    host = [jnp.full(4, 0.75 / 4)] * 2
    weights = [jax.device_put(w, NamedSharding(mesh.slice(stage=n), P())) for n, w in enumerate(host)]
    loop, x = mm.microbatch(total, 0, 1, argnum=1), jnp.ones((6, 4))
    got = mm.jit(loop, mesh=mesh)(weights, x)
    assert got.dtype == dtype
    np.testing.assert_allclose(float(got), float(loop(host, x)))
    np.testing.assert_allclose(float(got), 6 if dtype == jnp.int32 else 9)


def test_numbers_among_the_results_keep_their_weak_type(run):
    out = run(lambda a, x: mm.microbatch(lambda x: ((x @ a).sum(), 2.0), 0, 2, reduce="last")(x)[1], A, X)
    assert (out * jnp.bfloat16(1)).dtype == jnp.bfloat16


def test_maxima_in_a_type_without_infinity(run):
    f = lambda a, x: (x @ a).astype(jnp.float8_e4m3fn)
    got = run(lambda a, x: mm.microbatch(lambda x: f(a, x), 0, 2, reduce="max")(x), A, X)
    np.testing.assert_array_equal(got, np.max([f(A, X[n : n + 2]) for n in range(0, 8, 2)], axis=0))
