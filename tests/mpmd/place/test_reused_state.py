"""State that is used again further on: is it sent to the flow, or does the flow go back to it?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born, pipeline, place
from tests.slow import all_but, few, grid

WIDTH, STAGES = 16, 3
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
MESH, TASKS = pipeline(STAGES)


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(STAGES)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


PLACEMENT = place(TASKS, *[[("layers", n)] for n in range(STAGES)])


def recycled(model, x):
    """Two rounds, as in AlphaFold 2 (Jumper et al. 2021) or self-conditioned diffusion."""
    return (model(x + jax.lax.stop_gradient(model(x))) ** 2).mean()


def shared_rounds(model, x):
    """A universal transformer's (Dehghani et al. 2018): the gradient goes through both."""
    return (model(model(x)) ** 2).mean()


def scale_of(model):
    return jnp.max(jnp.stack([jnp.abs(p).max() for p in jax.tree.leaves(nnx.state(model, nnx.Param))]))


def quantised(model, x):
    """Fake quantisation with one scale for all weights, straight through (Bengio et al. 2013)."""
    graph, params = nnx.split(model)
    scale = jax.lax.stop_gradient(scale_of(model))
    levels = jax.tree.map(
        lambda p: p + jax.lax.stop_gradient(jnp.round(p / scale * 7) / 7 * scale - p), params
    )
    return (nnx.merge(graph, levels)(x) ** 2).mean()


def penalised(model, x):
    """A penalty on the norm of all weights."""
    norm = jnp.sqrt(sum(jnp.vdot(p, p) for p in jax.tree.leaves(nnx.state(model, nnx.Param))))
    return (model(x) ** 2).mean() + 0.1 * norm


def train(loss_fn, schedule, **options):
    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(loss_fn)
        if schedule is not None:
            grad_fn = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean", schedule=schedule, **options)
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def check(step):
    """Three calls of a step are those of one device; returns the shapes that cross in one."""
    reference = Net()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    whole, split = nnx.jit(step), mm.jit(step)
    with MESH:
        model = born(Net, PLACEMENT)
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        for n in range(3):
            x = np.roll(X, n, axis=0)
            assert_same(split(*state, x), whole(*references, x), 1e-4)
        assert_same(nnx.state(state), nnx.state(references), 1e-4)
        return [t.shape for t in split.program(*state, X).transfers]


@pytest.mark.parametrize(
    "loss_fn, schedule", grid([recycled, shared_rounds, quantised], [None, "1f1b", "gpipe"])
)
def test_activations_and_scalars_alone_cross(loss_fn, schedule):
    shapes = check(train(loss_fn, schedule))
    rows = 4 if schedule is None else 2
    assert shapes and set(shapes) <= {(), (rows, WIDTH)}


def several_heads(model, x):
    """Early exits (Teerapittayanon et al. 2017) by one head, that of the last stage or of the first."""
    loss = 0.0
    for layer in model.layers:
        x = jnp.tanh(layer(x))
        loss += (model.head(x) ** 2).mean()
    return loss


class Positions(Net):
    """Each layer adds the same learned positions to what it reads, as in DETR (Carion et al. 2020)."""

    def __init__(self):
        super().__init__()
        self.shared = nnx.Param(np.linspace(-1, 1, WIDTH, dtype=np.float32))

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x + self.shared[...]))
        return x


class OneNorm(Net):
    """Each layer begins with the same norm."""

    def __init__(self):
        super().__init__()
        self.shared = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(self.shared(x)))
        return x


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("make", [Positions, OneNorm])
def test_what_each_layer_begins_with_goes_to_the_layers(make, schedule):
    """Not what it makes of the activations, which would be sent beside them."""
    step = train(lambda model, x: (model(x) ** 2).mean(), schedule)
    many = np.tile(X, (16, 1))
    reference = make()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    owned = [[("layers", n), *(["shared"] if n == 0 else [])] for n in range(STAGES)]
    with MESH:
        model = born(make, place(TASKS, *owned))
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        split = mm.jit(step)
        assert_same(split(*state, many), nnx.jit(step)(*references, many), 1e-4)
        assert_same(nnx.state(state), nnx.state(references), 1e-4)
        sent = split.program(*state, many).transfers
    entries = sum(np.prod(t.shape, dtype=int) for t in sent if len(t.shape) == 2)
    assert entries == 2 * (STAGES - 1) * many.size
    shared = [t for t in sent if t.shape == (WIDTH,)]
    assert len(shared) == 2 * (STAGES - 1)  # there, and its gradients back


@pytest.mark.parametrize("where", all_but([STAGES - 1], range(STAGES)))
def test_a_head_of_every_stage_is_sent_once(where):
    class Exits(Net):
        def __init__(self):
            super().__init__()
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(9))

    owned = [[("layers", n), *(["head"] if n == where else [])] for n in range(STAGES)]
    step, many = train(several_heads, "1f1b"), np.tile(X, (16, 1))
    reference = Exits()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    with MESH:
        model = born(Exits, place(TASKS, *owned))
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        split = mm.jit(step)
        transfers = split.program(*state, many).transfers
        assert_same(split(*state, many), nnx.jit(step)(*references, many), 1e-4)
        assert_same(nnx.state(state), nnx.state(references), 1e-4)
    crossing = {(t.source, t.target) for t in transfers if t.microbatch is not None and len(t.shape) == 2}
    chain = {(f"stage{n}", f"stage{n + 1}") for n in range(STAGES - 1)}
    assert crossing == chain | {(target, source) for source, target in chain}


def skipping(model, x):
    """The first stage has two layers; the second reads what is between them, too."""
    between = jnp.tanh(model.layers[0](x))
    return ((model.layers[2](jnp.tanh(model.layers[1](between))) + between) ** 2).mean()


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_the_gradient_of_a_weight_is_made_where_it_is(schedule):
    """Though the last mesh has all that it is made of: it would send what is as large as the weight."""
    with MESH:
        model = born(Net, place(TASKS[:2], [("layers", 0), ("layers", 1)], [("layers", 2)]))
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        program = mm.jit(train(skipping, schedule)).program(*state, X)
    assert (WIDTH, WIDTH) not in {t.shape for t in program.transfers}


def test_where_the_stages_are_counted():
    """Going back would make five of three stages: where three are asked for, the weights are sent."""
    assert (WIDTH, WIDTH) in check(train(recycled, "1f1b", num_stages=STAGES))


@few(1)
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_penalty_on_all_weights(schedule):
    check(train(penalised, schedule))


def test_weights_clipped_by_their_norm():
    def clip(model):
        params = nnx.state(model, nnx.Param)
        norm = jnp.sqrt(sum(jnp.vdot(p, p) for p in jax.tree.leaves(params)))
        nnx.update(model, jax.tree.map(lambda p: p * jnp.minimum(1, 1 / norm), params))

    reference = Net()
    with MESH:
        model = born(Net, PLACEMENT)
        for _ in range(2):
            mm.jit(clip)(model)
            nnx.jit(clip)(reference)
        assert_same(nnx.state(model), nnx.state(reference), 1e-5)
        assert {t.shape for t in mm.jit(clip).program(model).transfers} == {()}


@pytest.mark.slow
def test_greedy_decoding():
    """A Python loop: the token goes back to the first stage, not the model to the last."""

    def decode(model, x):
        for _ in range(3):
            x = jax.nn.one_hot(model(x).argmax(-1), WIDTH)
        return x

    with MESH:
        model = born(Net, PLACEMENT)
        split = mm.jit(decode)
        for n in range(2):
            assert_same(split(model, X[n:]), nnx.jit(decode)(Net(), X[n:]))
        assert (WIDTH, WIDTH) not in {t.shape for t in split.program(model, X).transfers}


@few(1)
@pytest.mark.parametrize("vocab, goes", [(8, "embedding"), (512, "activation")])
def test_a_tied_embedding(vocab, goes):
    """Outside of a loop the smaller of the two goes; in one the embedding, once."""

    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(vocab, WIDTH, rngs=nnx.Rngs(0))
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, tokens):
            return self.embed.attend(jnp.tanh(self.layer(self.embed(tokens))))

    tokens = np.arange(24).reshape(4, 6) % vocab
    with MESH:
        model = born(Tied, place(TASKS[:2], ["embed"], ["layer"]))
        split = mm.jit(lambda model, tokens: model(tokens))
        assert_same(split(model, tokens), Tied()(tokens))
        shapes = [t.shape for t in split.program(model, tokens).transfers]
        assert ((vocab, WIDTH) in shapes) == (goes == "embedding")
        loop = mm.jit(mm.microbatch(lambda model, tokens: model(tokens), 0, 2, argnum=1, reduce="concat"))
        assert_same(loop(model, tokens), Tied()(tokens))
        assert [t.shape for t in loop.program(model, tokens).transfers].count((vocab, WIDTH)) == 1


@pytest.mark.slow
def test_a_value_meets_what_was_left_behind():
    """A gate that another mesh computes comes back to what it is for, not the other way round."""

    class Gated(nnx.Module):
        def __init__(self):
            self.up, self.gate, self.down = (
                nnx.Linear(*io, rngs=nnx.Rngs(0)) for io in ((WIDTH, 64), (64, 1), (64, WIDTH))
            )

        def __call__(self, x):
            hidden = jnp.tanh(self.up(x))
            return self.down(hidden * jax.nn.sigmoid(self.gate(hidden)))

    with MESH:
        model = born(Gated, place(TASKS[:2], ["up", "down"], ["gate"]))
        split = mm.jit(lambda model, x: model(x))
        assert_same(split(model, X), Gated()(X))
        assert [t.shape for t in split.program(model, X).transfers] == [(4, 64), (4, 1)]


class Remembering(Net):
    """Layers that add what they are given to a cache, and read all of it."""

    def __init__(self):
        super().__init__()
        self.caches = nnx.List(nnx.Cache(jnp.zeros((4, 32, WIDTH))) for _ in range(STAGES))

    def __call__(self, x, index):
        for layer, cache in zip(self.layers, self.caches):
            cache[...] = cache[...].at[:, index].set(x)
            x = x + jnp.tanh(layer(x + cache[...].mean(1)))
        return x


REMEMBERING = place(TASKS, *[[("layers", n), ("caches", n)] for n in range(STAGES)])


@few(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda cache, rows: cache[rows],
        lambda cache, rows: jnp.einsum("ij,jkl->ikl", jax.nn.one_hot(rows, 4), cache),
        lambda cache, rows: jnp.where((rows > 1)[:, None, None], 0, cache),
        lambda cache, rows: cache.at[rows[0]].multiply(0.5),
    ],
    ids=["rows", "one hot", "where", "in part"],
)
@pytest.mark.parametrize("steps", [1, 3, "scan"])
def test_caches_that_the_last_mesh_has_a_word_in(change, steps):
    """As in beam search, also of several steps in one call: the word is sent to them."""

    def one(model, x, n):
        x = model(x, n)
        rows = jnp.argsort(x.sum(-1))
        for cache in model.caches:
            cache[...] = change(cache[...], rows)
        return x[rows]

    def decode(model, x):
        if steps == "scan":
            return nnx.scan(one, in_axes=(nnx.StateAxes({...: nnx.Carry}), nnx.Carry, 0), out_axes=nnx.Carry)(
                model, x, jnp.arange(2)
            )
        for n in range(steps):
            x = one(model, x, n)
        return x

    whole = Remembering()
    with MESH:
        model = born(Remembering, REMEMBERING)
        split = mm.jit(decode)
        shapes = {t.shape for t in split.program(model, X).transfers}
        assert_same(split(model, X), nnx.jit(decode)(whole, X))
    assert_same(nnx.state(model), nnx.state(whole))
    assert all(np.prod(shape) <= X.size for shape in shapes), shapes
