"""Generation: the tokens are those of full forwards, drawn from the distribution asked for, on all stages."""

from __future__ import annotations

import functools
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules import decode
from mmnnx.modules.generate import generate
from mmnnx.modules.gpt2 import GPT2, GPT2Config
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.modules.moe_lm import MoELM, MoELMConfig
from mmnnx.modules.sampling import filter_logits
from mmnnx.train.sample import sample
from tests.slow import all_but

SMALL = dict(vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp=24)
RULES = [(axis, "model") for axis in ("vocab", "heads", "kv_heads", "mlp")]


class Counted(LM):
    """An LM that counts how often its call is traced."""

    traces: ClassVar[Counter] = Counter()

    def __call__(self, tokens, **options):
        self.traces[tokens.shape] += 1
        return super().__call__(tokens, **options)


@functools.cache
def build(seed: int = 0, cls: type[LM] = LM, **options) -> LM:
    """A model whose blocks do something, and whose logits differ enough for no token to win always."""
    model = cls(LMConfig(**(SMALL | options)), rngs=nnx.Rngs(seed))
    noise = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(variable[...] + 0.3 * noise.normal(size=variable.shape).astype(np.float32))
    return model


def prompts(batch=3, length=6, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32, (batch, length))


forward = nnx.jit(lambda model, tokens: model(tokens))


def by_full_forwards(model: LM, prompt: np.ndarray, count: int) -> np.ndarray:
    """The likeliest tokens, one after the other, without a cache; of one length, so compiled once."""
    length = prompt.shape[1]
    tokens = np.pad(prompt, ((0, 0), (0, max(count, 16 - length))))
    for at in range(length, length + count):
        tokens[:, at] = np.argmax(forward(model, tokens)[:, at - 1], axis=-1)
    return tokens[:, length : length + count]


@functools.cache
def placed(stages: int = 4, layers: int = 4, **options) -> tuple[mm.MultiMesh, LM]:
    """A model of `build` with a block or segment for each stage, over the two devices of each."""
    sizes = stages, 2
    devices = np.array(jax.devices()[: 2 * stages]).reshape(sizes)
    mesh = mm.MultiMesh(axis_sizes=sizes, axis_names=("stage", "model"), devices=devices)
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}, logical_axes=RULES) for i in range(stages)]
    under = ("blocks", "segments") if options.get("scan") else ("blocks",)
    placement = {mm.path("embed"): tasks[0], mm.path(...): tasks[-1]}
    placement = mm.TaskSharding({mm.path(*under, i): task for i, task in enumerate(tasks)} | placement)
    model = nnx.clone(build(layers=layers, **options))
    with mesh:
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            home = placement.lookup(path, variable).sharding
            variable.set_raw_value(jax.device_put(variable.get_raw_value(), home))
    return mesh, model


GREEDY = [{}, dict(scan=1, window=4), dict(tied=True, qk_norm=True, bias=True, head_dim=8)]


@pytest.mark.slow
@pytest.mark.parametrize("options", GREEDY)
def test_greedy_tokens_are_the_likeliest_of_full_forwards(options):
    model = build(**options)
    tokens = generate(model, prompts(), 7)
    assert (tokens.shape, tokens.dtype) == ((3, 7), jnp.int32)
    np.testing.assert_array_equal(tokens, by_full_forwards(model, prompts(), 7))
    assert len(np.unique(tokens)) >= 3


@pytest.mark.parametrize("length", all_but([1], [1, 2]))
def test_a_prompt_may_be_short(length):
    model, prompt = build(), prompts(length=length)
    np.testing.assert_array_equal(generate(model, prompt, 3), by_full_forwards(model, prompt, 3))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, 2])
def test_rows_of_several_lengths(scan):
    model, prompt, lengths = build(scan=scan), prompts(4, 6), [6, 1, 3, 5]
    prompt[1, 1:] = -1  # padding may be any number
    tokens = generate(model, prompt, 5, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = prompt[row : row + 1, :length]
        np.testing.assert_array_equal(tokens[row], by_full_forwards(model, alone, 5)[0])


def test_padding_is_not_read():
    model, prompt = build(), prompts(2, 6)
    other = prompt.copy()
    other[0, 4:] = 31 - other[0, 4:]
    tokens = [generate(model, p, 4, lengths=np.array([4, 6])) for p in (prompt, other)]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),
        pytest.param(
            dict(scan=4),
            dict(lengths=(2, 6, 3), temperature=1.5, top_k=20, top_p=0.95, key=3),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(tied=True), dict(lengths=(2, 6, 3)), marks=pytest.mark.slow),
    ],
)
def test_over_four_stages_as_on_one_device(options, how):
    if "key" in how:
        how = how | dict(key=jax.random.key(how["key"]))
    expected = generate(build(layers=4, **options), prompts(), 3, **how)
    mesh, model = placed(**options)
    with mesh:
        tokens = generate(model, prompts(), 3, **how, in_flight=3, prefill_chunk=2)
    np.testing.assert_array_equal(tokens, expected)
    # Each call sends its tokens to where they are read, ahead of what comes after it.
    assert tokens.sharding.device_set == set(mesh.devices[0])


@pytest.mark.parametrize("scan", [False, pytest.param(4, marks=pytest.mark.slow)])
def test_caches_stay_on_their_stages_and_tokens_alone_go_round(scan):
    mesh, model = placed(scan=scan) if scan else placed()
    choice = dict(key=jax.random.key(0), temperature=np.float32(1), top_p=None, top_k=None)
    choice |= dict(greedy=True, eos=())
    part, last, rows = prompts().astype(np.int32), np.int32([[1], [2], [3]]), np.arange(3, dtype=np.int32)
    held = np.int32([5, 3, 1])
    with mesh:
        reading = decode._prefill.program(model, None, part, np.int32(0), capacity=8)
        cache = decode._prefill(model, None, part, np.int32(0), capacity=8)
        token, cache = decode._decode(model, cache, last, held, np.uint32(0), rows, capacity=8, **choice)
        step = model, cache, token, held + 1, np.uint32(1), rows
        program = decode._decode.program(*step, capacity=8, **choice)
        first = model, cache, last, held, np.uint32(0), rows
        home = decode._decode.input_shardings(*first, capacity=8, **choice)[0][2]
        in_flight = decode._decode_to(home).program(*first, capacity=8, **choice)
        _, after = decode._decode(*step, capacity=8, **choice)
    for caches in (cache, after):
        for devices, of_stage in zip(mesh.devices, caches, strict=True):
            arrays = jax.tree.leaves(of_stage)
            assert [array.sharding.device_set for array in arrays] == [set(devices)] * 2  # keys, values
            assert all(a.sharding.shard_shape(a.shape)[-2] == 1 for a in arrays)  # one of two heads each
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))  # each step takes over the last one's
    # Of the prompt no logits are made but those of its last tokens, which go through `_decode`.
    assert "f32[3,1,32]" in str(program.fragments[-1].jaxpr)
    assert not any("f32[3,6,32]" in str(fragment.jaxpr) for fragment in reading.fragments)
    sent = [(t.source, t.target, t.shape) for t in program.transfers]
    onwards = [(f"stage{i}", f"stage{i + 1}", (3, 1, 16)) for i in range(3)]
    assert sent == [("stage3", "stage0", (3, 1)), *onwards]
    # Of several groups each call sends its own token back, and not the next call.
    sent = [(t.source, t.target, t.shape) for t in in_flight.transfers]
    assert sent == [*onwards, ("stage3", "stage0", (3, 1))]


@pytest.mark.slow
def test_compiled_once_for_a_shape_also_over_calls():
    mesh, model = placed(stages=2, layers=2, cls=Counted)
    Counted.traces.clear()
    with mesh:
        generate(model, prompts(), 6, capacity=20)
        first = dict(Counted.traces)
        generate(model, prompts(seed=1), 4, capacity=20)
        generate(model, prompts(seed=2), 9, capacity=20)
        assert Counted.traces == first
        assert first == {(3, 5): 1, (3, 1): 1}  # the prompt, and each token after
        generate(model, prompts(length=4), 9, capacity=20)
    assert Counted.traces == first | {(3, 3): 1}


def test_rows_that_have_met_eos_keep_emitting_it():
    model = build()
    free = np.asarray(generate(model, prompts(), 12))
    eos = int(free[0, 3])
    tokens = np.asarray(generate(model, prompts(), 12, eos=eos))
    assert eos in free[0] and (free[0, 4:] != eos).any()
    for row, own in zip(tokens, free):
        ends = np.flatnonzero(own == eos)
        end = ends[0] if ends.size else 12
        np.testing.assert_array_equal(row[:end], own[:end])
        assert (row[end:] == eos).all()


def test_each_of_several_tokens_ends_a_row():
    model = build()
    free = np.asarray(generate(model, prompts(), 12))
    first, other = int(free[0, 2]), int(next(t for t in free[1] if t not in free[0]))
    tokens = np.asarray(generate(model, prompts(), 12, eos=[first, other]))
    for row, own in zip(tokens, free):
        end = min(np.append(np.flatnonzero(np.isin(own, [first, other])), 11))
        np.testing.assert_array_equal(row[: end + 1], own[: end + 1])
        assert (row[end:] == row[end]).all()
    assert tokens[0, -1] == first and other in tokens[1]


@pytest.mark.slow
def test_when_all_rows_have_ended_nothing_more_is_computed(monkeypatch):
    model, steps = build(), []
    step = decode._decode
    monkeypatch.setattr(decode, "_decode", lambda *args, **kwargs: steps.append(1) or step(*args, **kwargs))
    eos = int(generate(model, prompts(1), 40)[0, 1])
    steps.clear()
    tokens = np.asarray(generate(model, prompts(1), 40, eos=eos))
    assert tokens.shape == (1, 40) and (tokens[0, 1:] == eos).all()
    assert len(steps) <= 3


def note_calls(monkeypatch, note):
    """Tells `note` of each call that makes tokens of a group: the step, and the numbers of its rows."""
    decode_to = decode._decode_to

    def noted(home):
        def step(*args, **kwargs):
            note(int(args[4]), args[5].tolist())
            return decode_to(home)(*args, **kwargs)

        return step

    monkeypatch.setattr(decode, "_decode_to", noted)


@pytest.mark.slow
def test_groups_follow_each_other(monkeypatch):
    """Each is dispatched before the next token of any, and before the host looks at one."""
    model, prompt, order = build(), prompts(6), []
    whole = np.asarray(generate(model, prompt, 4))
    note_calls(monkeypatch, lambda step, rows: order.append((step, rows)))
    shown = []
    tokens = generate(
        model, prompt, 4, in_flight=3, on_token=lambda tokens: shown.append((len(order), tokens))
    )
    assert order == [(n, rows) for n in range(4) for rows in ([0, 1], [2, 3], [4, 5])]
    assert [count for count, _ in shown] == [6, 9, 12, 12]
    np.testing.assert_array_equal(tokens, whole)
    np.testing.assert_array_equal(np.stack([tokens for _, tokens in shown], axis=1), whole)


@pytest.mark.slow
def test_a_group_that_has_ended_is_not_computed_while_others_are(monkeypatch):
    model, prompt, steps = build(), prompts(2), Counter()
    free = np.asarray(generate(model, prompt, 10))
    eos = int(next(t for t in free[0] if t not in free[1]))
    note_calls(monkeypatch, lambda step, rows: steps.update(rows))
    shown = []
    tokens = np.asarray(generate(model, prompt, 10, eos=eos, in_flight=2, on_token=shown.append))
    end = free[0].tolist().index(eos)
    assert steps == {0: min(end + 2, 10), 1: 10}
    np.testing.assert_array_equal(tokens[1], free[1])
    assert (tokens[0, end:] == eos).all()
    np.testing.assert_array_equal(np.stack(shown, axis=1), tokens)


@pytest.mark.slow
def test_a_prompt_in_parts():
    model, prompt = build(), prompts(2, 9)
    expected = generate(model, prompt, 3, lengths=[9, 4])
    for chunk in (1, 3, 20):
        found = generate(model, prompt, 3, lengths=[9, 4], prefill_chunk=chunk)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_options_may_be_arrays_of_one_number():
    options = dict(temperature=0.5, top_k=3, eos=3)
    arrays = {name: jnp.asarray(value) for name, value in options.items()}
    draw = lambda how: generate(build(), prompts(1), 4, key=jax.random.key(0), **how)
    np.testing.assert_array_equal(draw(arrays), draw(options))


@pytest.mark.slow
def test_a_prompt_may_end_with_eos():
    model = build()
    free = generate(model, prompts(1), 4)
    last = int(prompts(1)[0, -1])
    assert last not in np.asarray(free)
    np.testing.assert_array_equal(generate(model, prompts(1), 4, eos=last), free)


def filtered(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The probabilities tokens should be drawn with, one row at a time."""
    rows = []
    for row in np.asarray(logits, np.float64) / temperature:
        order = np.argsort(-row, kind="stable")[: top_k or len(row)]
        p = np.exp(row[order] - row[order[0]])
        p /= p.sum()
        kept = len(p) if top_p is None else int(np.searchsorted(np.cumsum(p), top_p - 1e-9)) + 1
        out = np.zeros(len(row))
        out[order[:kept]] = p[:kept] / p[:kept].sum()
        rows.append(out)
    return np.stack(rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 32, 100])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.3, 0.9])
def test_filtered_logits_against_numpy(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32) * 2
    got = jax.nn.softmax(filter_logits(jnp.asarray(logits), temperature, top_k, top_p), axis=-1)
    expected = filtered(logits, temperature, top_k, top_p)
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_nucleus_is_the_smallest_set_that_reaches_top_p_and_ties_are_kept():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    kept = lambda **options: np.isfinite(filter_logits(logits, **options)).tolist()
    assert kept(top_p=0.35) == [True, False, False, False]
    assert kept(top_p=0.45) == [True, True, False, False]
    assert kept(top_p=0.75) == [True, True, True, False]
    assert kept(top_k=3, top_p=0.75) == [True, True, False, False]  # of three: 0.44, 0.33, 0.22
    assert np.isfinite(filter_logits(jnp.zeros(5), top_k=2)).all()
    assert filter_logits(logits.astype(jnp.bfloat16)).dtype == jnp.float32


class Fixed(nnx.Module):
    """Says the same logits whatever it reads; its cache is no KVCache but a number."""

    def __init__(self, logits):
        self.logits = nnx.Param(jnp.asarray(logits, jnp.float32))

    def init_cache(self, batch, capacity):
        return {"read": jnp.zeros((), jnp.int32)}

    def __call__(self, tokens, *, cache):
        logits = jnp.broadcast_to(self.logits[...], (*tokens.shape, self.logits.shape[0]))
        return logits, {"read": cache["read"] + tokens.shape[1]}


def test_tokens_are_drawn_from_the_filtered_distribution():
    logits = np.random.default_rng(1).normal(size=8)
    options = dict(temperature=0.8, top_k=5, top_p=0.9)
    p = filtered(logits[None], *options.values())[0]
    tokens = generate(Fixed(logits), np.zeros((2000, 1), int), 2, key=jax.random.key(0), **options)
    for column in np.asarray(tokens).T:  # each step draws anew
        found = np.bincount(column, minlength=8) / 2000
        assert (found[p == 0] == 0).all()
        np.testing.assert_allclose(found, p, atol=5 * np.sqrt(0.25 / 2000))
    assert (tokens[:, 0] != tokens[:, 1]).any()


@pytest.mark.slow
def test_the_key_decides_and_top_k_of_one_is_greedy():
    draw = lambda seed, **options: np.asarray(
        generate(build(layers=1), prompts(), 8, key=jax.random.key(seed), **options)
    )
    np.testing.assert_array_equal(draw(0, temperature=1.0), draw(0, temperature=1.0))
    assert (draw(0, temperature=1.0) != draw(1, temperature=1.0)).any()
    greedy = generate(build(layers=1), prompts(), 8)
    np.testing.assert_array_equal(draw(0, temperature=1.0, top_k=1), greedy)
    np.testing.assert_array_equal(draw(0, temperature=0.7, top_p=1e-6), greedy)
    np.testing.assert_array_equal(
        draw(2, temperature=1.0, top_p=1), draw(2, temperature=1.0)
    )  # all probability is all tokens


@pytest.mark.slow
def test_the_smallest_temperature_takes_the_likeliest_token():
    logits = np.array([5.0, 90.0, 5.0, 89.0, -np.inf], np.float32)
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        tokens = generate(Fixed(logits), [[1]], 4, temperature=1.2e-38, key=jax.random.key(0), **options)
        np.testing.assert_array_equal(tokens, [[1] * 4])
    assert filter_logits(jnp.array([jnp.inf, 0]), 0.5).tolist() == [jnp.inf, 0]


def test_any_model_with_a_cache_will_do():
    logits = np.arange(8)
    np.testing.assert_array_equal(generate(Fixed(logits), [[1, 2, 3]], 4), [[7, 7, 7, 7]])


@pytest.mark.parametrize(
    ("error", "options", "says"),
    [
        (ValueError, dict(max_new_tokens=0), "at least one token"),
        (ValueError, dict(in_flight=2), r"in_flight=2 groups do not divide the 3 rows .*: \[1, 3\] do"),
        (ValueError, dict(in_flight=0), "in_flight=0"),
        (ValueError, dict(prefill_chunk=0), "prefill_chunk=0: at least one"),
        (ValueError, dict(capacity=8), "capacity=8 is too small for a prompt of 6 tokens and 4 new ones"),
        (ValueError, dict(temperature=-1.0), "temperature=-1.0"),
        (ValueError, dict(temperature=1.0), "needs a key: key="),
        (TypeError, dict(temperature=1.0, key=0), "key=0 is no PRNG key"),
        (ValueError, dict(top_k=3), "temperature=0 takes the likeliest token"),
        (ValueError, dict(top_p=0.5), "temperature=0 takes the likeliest token"),
        (ValueError, dict(temperature=1.0, key=0, top_k=0), "top_k=0: at least one"),
        (ValueError, dict(temperature=1.0, key=0, top_p=0.0), "top_p=0.0: it is a probability"),
        (ValueError, dict(temperature=1.0, key=0, top_p=1.5), "top_p=1.5: it is a probability"),
        (ValueError, dict(temperature=float("nan"), key=0), "temperature=nan: it is 0"),
        (ValueError, dict(temperature=float("inf"), key=0), "temperature=inf: it is 0"),
        (ValueError, dict(temperature=1e-38, key=0), "temperature=1e-38: it is 0"),
        (
            ValueError,
            dict(temperature=1e39, key=0),
            r"temperature=1e\+39: it is 0 .* or from 1.2e-38 to 3.4e",
        ),
        (ValueError, dict(prompt=[[1, 2], [3]]), "rows of a prompt are of one length: pad them, and give"),
        (ValueError, dict(lengths=[1, 2]), r"lengths= is int \[3\].*it is int64\[2\]"),
        (ValueError, dict(lengths=[1.0, 2.0, 3.0]), r"it is float64\[3\]"),
        (ValueError, dict(lengths=[0, 2, 3]), "lengths= are from 1 to 6"),
        (ValueError, dict(lengths=[1, 2, 7]), "lengths= are from 1 to 6"),
        (ValueError, dict(prompt=np.zeros((3, 0), int)), r"at least one token in each row; it is \(3, 0\)"),
        (ValueError, dict(prompt=np.zeros(3, int)), r"it is \(3,\)"),
        (ValueError, dict(prompt=[[1, 32]]), "prompt= has the token 32, and those of LM are from 0 to 31"),
        (ValueError, dict(prompt=[[1, -1]]), "prompt= has the token -1"),
        (ValueError, dict(eos=32), "eos= has the token 32"),
        (
            ValueError,
            dict(model=Fixed([1.0, 2.0]), prompt=[[-1]]),
            "and those of Fixed are 0 or above",
        ),
        (TypeError, dict(prompt=np.zeros((3, 6))), "integers .* not of float64"),
        (TypeError, dict(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "Linear has no init_cache"),
        (TypeError, dict(model=Fixed([1.0, 2.0]), lengths=[1, 2, 3]), "the caches of Fixed also hold"),
    ],
)
def test_arguments_that_will_not_do(error, options, says):
    given = dict(model=build(layers=1), prompt=prompts(), max_new_tokens=4) | options
    with pytest.raises(error, match=says):
        generate(given.pop("model"), given.pop("prompt"), given.pop("max_new_tokens"), **given)


def test_tokens_beyond_learned_positions():
    model = GPT2(GPT2Config(layers=1, width=16, heads=2, kv_heads=2, mlp=16, positions=8), rngs=nnx.Rngs(0))
    assert generate(model, prompts(), 3).shape == (3, 3)
    with pytest.raises(ValueError, match="6 tokens and 4 new ones need 9 positions, and GPT2 has 8"):
        generate(model, prompts(), 4)
    with pytest.raises(ValueError, match="9 tokens are more than the 8 learned positions"):
        model(jnp.zeros((1, 9), jnp.int32))


def test_the_smallest_capacity_is_enough():
    np.testing.assert_array_equal(
        generate(build(), prompts(), 4, capacity=9), generate(build(), prompts(), 4)
    )


@pytest.mark.slow
def test_text_goes_on_beyond_the_window():
    model = build(vocab=256)
    prompt = np.frombuffer(b"pipe", np.uint8)
    start = sample(model, prompt, 30, 8, temperature=1e-4)
    assert start.shape == (34,) and bytes(start[:4].tolist()) == b"pipe"
    # When eight tokens are full, the last four of them are the next prompt.
    np.testing.assert_array_equal(start[4:8], by_full_forwards(model, start[None, :4], 4)[0])
    np.testing.assert_array_equal(start[8:12], by_full_forwards(model, start[None, 4:8], 4)[0])
    assert sample(model, prompt[:2], 0, 4).tolist() == prompt[:2].tolist()


STACKED = [(LM, LMConfig), (MoELM, MoELMConfig)]


@pytest.mark.parametrize("model, config", all_but([], STACKED))
def test_with_a_scanned_stack_in_pieces(model, config):
    """Its KV caches, stacked over layers too, are where the layers are: two, two, one and one."""
    sizes = config(layers=6, width=16, heads=2, kv_heads=2, vocab=32, mlp=32, scan=True)
    make = lambda: model(sizes, rngs=nnx.Rngs(0))
    prompt = jnp.arange(6)[None]
    expected = mm.generate(make(), prompt, 5)
    with mm.MultiMesh(axis_sizes=(4,), axis_names=("stage",)):
        placement = mm.pipeline_sharding(nnx.eval_shape(make), 4, weights=[1, 1, 1, 1, 2, 2])
        placed = mm.jit(make, out_shardings=placement)()
        found = mm.generate(placed, prompt, 5)
    np.testing.assert_array_equal(found, expected)
