"""Stacks of layers over stages: what goes where, how evenly, and what is refused."""

from __future__ import annotations

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.stack import Stack
from mmnnx.sharding.pipeline import attribute_order, balance, pipeline_sharding
from mmnnx.sharding.rules import logical_rules
from mmnnx.sharding.stacked import stacked_length
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_parity, homes, pipeline
from tests.sharding.layouts import layout, linear, real_abstract_and_jitted, stages_of, tasks
from tests.slow import few


class Chain(nnx.Module):
    """Blocks of given widths, each of width squared parameters."""

    def __init__(self, *widths: int, vocab: int = 0, out: int = 0):
        if vocab:
            self.embed = nnx.Embed(vocab, 1, rngs=nnx.Rngs(0))
        self.blocks = nnx.List(linear(width) for width in widths)
        if out:
            self.head = linear(1, out=out)


class Backwards(nnx.Module):
    """Names in the reverse of alphabetical order, so that sorting them would put each on the wrong side."""

    def __init__(self, blocks: int = 4):
        self.word = nnx.Embed(3, 2, rngs=nnx.Rngs(0))
        self.positions = nnx.Param(jnp.ones((3, 2)))
        self.layers = nnx.List(linear(2, seed) for seed in range(blocks))
        self.gain = nnx.Param(jnp.ones(2))
        self.answer = linear(2)


class TestBalance:
    @given(st.data())
    def test_is_best_of_all_splits(self, data):
        sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
        holding = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
        if not any(holding):
            holding[0] = True
        stages = data.draw(st.integers(1, sum(holding)))

        def runs(ends):
            return [slice(start, end) for start, end in itertools.pairwise((0, *ends))]

        def score(ends):
            totals = [sum(sizes[run]) for run in runs(ends)]
            return max(totals), sum(total**2 for total in totals)

        every = [(*cuts, len(sizes)) for cuts in itertools.combinations(range(1, len(sizes)), stages - 1)]
        allowed = [ends for ends in every if all(any(holding[run]) for run in runs(ends))]
        found = tuple(balance(sizes, stages, holding))
        assert found in allowed
        assert score(found) == min(map(score, allowed))
        ties = [ends for ends in allowed if score(ends) == score(found)]
        assert tuple(reversed(found)) == min(tuple(reversed(ends)) for ends in ties)

    def test_does_not_need_to_come_out_even_and_gives_early_stages_less(self):
        assert balance([1] * 10, 4) == [2, 4, 7, 10]
        assert balance([0.1] * 7, 3) == [2, 4, 7]

    def test_evens_out_what_the_largest_leaves_free(self):
        assert balance([9, 1, 1, 1, 1], 3) == [1, 3, 5]

    def test_a_deep_model_over_many_stages_is_soon_done(self):
        """Sizes of runs are squared once, not for each number of runs, and only of those that are allowed."""

        class Size(int):
            squared = 0

            def __add__(self, other):
                return Size(int(self) + other)

            def __pow__(self, exponent):
                Size.squared += 1
                return int(self) ** exponent

        ends = balance([Size(1)] * 126, 16)
        assert set(np.diff([0, *ends])) == {7, 8}
        assert Size.squared <= 126 * 8


class TestPlaces:
    def test_runs_of_layers_with_what_comes_before_and_after(self):
        placement = pipeline_sharding(Chain(*[4] * 7, vocab=5, out=5), 3)
        assert layout(placement) == [
            "path('embed') stage0",
            "path('blocks', range(0, 2)) stage0",
            "path('blocks', range(2, 5)) stage1",
            "path('blocks', range(5, 7)) stage2",
            "path('head') stage2",
        ]
        assert [spec for _, spec in placement.rules] == [None] * 5
        assert [task for task, _ in placement.rules[1:4]] == [
            mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(3)
        ]

    def test_a_model_without_a_param_is_balanced_by_all_of_its_state(self):
        """As one of Keras, whose Variables are of a class of their own. One Param, and they count nothing."""

        class Weight(nnx.Variable):
            pass

        model = Chain(4, 1, 1, 1, 1, 3, 2)
        for layer in model.blocks:
            layer.kernel = Weight(layer.kernel[...])
        assert layout(pipeline_sharding(model, 2)) == [
            "path('blocks', 0) stage0",
            "path('blocks', range(1, 7)) stage1",
        ]
        model.blocks[2].gain, model.blocks[5].gain = nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))
        assert layout(pipeline_sharding(model, 2)) == [
            "path('blocks', range(0, 3)) stage0",
            "path('blocks', range(3, 7)) stage1",
        ]

    def test_one_layer_is_named_by_its_index(self):
        assert layout(pipeline_sharding(Chain(1, 1), 2)) == [
            "path('blocks', 0) stage0",
            "path('blocks', 1) stage1",
        ]

    def test_uneven_layers_and_large_ends_are_balanced_by_their_parameters(self):
        assert layout(pipeline_sharding(Chain(4, 1, 1, 1, 1, 3, 2), 2)) == [
            "path('blocks', 0) stage0",
            "path('blocks', range(1, 7)) stage1",
        ]
        assert layout(pipeline_sharding(Chain(*[2] * 6, vocab=12), 2))[1:] == [
            "path('blocks', 0) stage0",
            "path('blocks', range(1, 6)) stage1",
        ]

    def test_given_weights_instead(self):
        model = Chain(1, 1, 1, 9, vocab=100)
        assert layout(pipeline_sharding(model, 2, weights=[3, 1, 1, 1]))[1:] == [
            "path('blocks', 0) stage0",
            "path('blocks', range(1, 4)) stage1",
        ]
        assert layout(pipeline_sharding(model, 2, weights=[0.0, 0.5, 0.5, 1.0]))[1:3] == [
            "path('blocks', range(0, 3)) stage0",
            "path('blocks', 3) stage1",
        ]

    @pytest.mark.parametrize("model", real_abstract_and_jitted(Backwards), ids=["real", "abstract", "jitted"])
    def test_before_and_after_are_as_init_made_them_also_of_a_model_that_was_merged(self, model):
        assert layout(pipeline_sharding(model, 2, "layers", weights=[1] * 4)) == [
            "path('word') stage0",
            "path('positions') stage0",
            "path('layers', range(0, 2)) stage0",
            "path('layers', range(2, 4)) stage1",
            "path('gain') stage1",
            "path('answer') stage1",
        ]

    def test_what_is_named_goes_where_it_is_named(self):
        model = Backwards(2)
        sides = dict(first=("word", "answer"), last=["positions", "gain"])
        found = stages_of(model, pipeline_sharding(model, tasks(2), "layers", **sides))
        assert found["answer.kernel"] == found["word.embedding"] == "t0"
        assert found["positions"] == found["gain"] == "t1"
        found = stages_of(
            model, pipeline_sharding(model, tasks(2), "layers", first=sides["first"] + ("positions",))
        )
        assert found["positions"] == "t0" and found["gain"] == "t1"  # the other side is as without names

    def test_tasks_of_ones_own(self):
        own = tasks(2)
        placement = pipeline_sharding(Chain(1, 1), tuple(own))
        assert [task for task, _ in placement.rules] == own

    def test_rules_become_the_logical_axes_of_the_tasks(self):
        for rules in (logical_rules("tensor"), [("mlp", "model")]):
            placement = pipeline_sharding(Chain(1, 1), 2, rules=rules)
            assert ("mlp", "model") in placement.rules[1][0].logical_axes

    def test_layers_without_state_of_their_own_ride_along(self):
        model = nnx.Sequential(linear(2), nnx.relu, nnx.Dropout(0.5), linear(2, 1), jnp.tanh, linear(2, 2))
        assert layout(pipeline_sharding(model, 3, "layers", weights=[1, 9, 9, 1, 9, 1])) == [
            "path('layers', 0) stage0",
            "path('layers', 3) stage1",
            "path('layers', 5) stage2",
        ]


class Inner(nnx.Module):
    def __init__(self, blocks: int, seed: int):
        self.tokens = nnx.Embed(3, 2, rngs=nnx.Rngs(seed))
        self.blocks = nnx.List(linear(2, seed + i) for i in range(blocks))
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))


class Nested(nnx.Module):
    def __init__(self):
        self.vision = linear(2)
        self.encoder = Inner(2, 0)
        self.bridge = linear(2)
        self.decoder = Inner(2, 10)
        self.head = linear(2)


class TestPaths:
    @pytest.mark.parametrize("place", ["decoder.blocks", ("decoder", "blocks")])
    def test_nested(self, place):
        found = layout(pipeline_sharding(Nested(), 2, place, weights=[1, 1]))
        assert found == [
            "path('vision') stage0",
            "path('encoder') stage0",
            "path('bridge') stage0",
            "path('decoder', 'tokens') stage0",
            "path('decoder', 'blocks', 0) stage0",
            "path('decoder', 'blocks', 1) stage1",
            "path('decoder', 'norm') stage1",
            "path('head') stage1",
        ]

    def test_through_a_list(self):
        model = nnx.Dict(towers=nnx.List([Inner(2, 0)]))
        for place in ("towers.0.blocks", ("towers", 0, "blocks"), ("towers", "0", "blocks")):
            assert "path('towers', 0, 'blocks', 1) stage1" in layout(pipeline_sharding(model, 2, place))

    def test_a_name_within_another(self):
        found = layout(
            pipeline_sharding(
                Nested(),
                2,
                "decoder.blocks",
                first=["vision", "encoder", "bridge", "decoder.tokens"],
                last=["encoder.norm", "decoder.norm", "head"],
                weights=[1, 1],
            )
        )
        assert found[1:5] == [
            "path('encoder', 'tokens') stage0",
            "path('encoder', 'blocks') stage0",
            "path('encoder', 'norm') stage1",
            "path('bridge') stage0",
        ]
        nearer = layout(
            pipeline_sharding(
                Nested(),
                2,
                "decoder.blocks",
                first=["vision", "encoder.norm", "bridge", "decoder.tokens"],
                last=["encoder", "decoder.norm", "head"],
                weights=[1, 1],
            )
        )
        assert "path('encoder', 'norm') stage0" in nearer
        assert "path('encoder', 'tokens') stage1" in nearer

    def test_several_stacks_one_after_the_other(self):
        found = layout(pipeline_sharding(Nested(), 4, ["encoder.blocks", "decoder.blocks"], weights=[1] * 4))
        assert found == [
            "path('vision') stage0",
            "path('encoder', 'tokens') stage0",
            "path('encoder', 'blocks', 0) stage0",
            "path('encoder', 'blocks', 1) stage1",
            "path('encoder', 'norm') stage1",
            "path('bridge') stage1",
            "path('decoder', 'tokens') stage2",
            "path('decoder', 'blocks', 0) stage2",
            "path('decoder', 'blocks', 1) stage3",
            "path('decoder', 'norm') stage3",
            "path('head') stage3",
        ]
        one = layout(pipeline_sharding(Nested(), 1, ["encoder.blocks", "decoder.blocks"]))
        assert "path('encoder', 'blocks', range(0, 2)) stage0" in one
        assert "path('decoder', 'blocks', range(0, 2)) stage0" in one

    def test_the_order_of_stacks_is_that_of_the_argument(self):
        found = layout(pipeline_sharding(Nested(), 2, ["decoder.blocks", "encoder.blocks"], weights=[1] * 4))
        assert "path('decoder', 'blocks', range(0, 2)) stage0" in found
        assert "path('encoder', 'blocks', range(0, 2)) stage1" in found


class TestStacks:
    def test_a_list_of_stacks_goes_by_their_parameters(self):
        model = nnx.eval_shape(make(models.ScanNet, stages=3, depth=4))
        found = layout(pipeline_sharding(model, 3, "stacks"))
        assert found[1:4] == [f"path('stacks', {i}) stage{i}" for i in range(3)]

    def test_segments_of_a_stack_of_unlike_lengths(self):
        model = nnx.Dict(
            blocks=Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 6, segments=[3, 1, 1, 1], rngs=nnx.Rngs(0))
        )
        assert layout(pipeline_sharding(model, 2)) == [
            "path('blocks', 'segments', 0) stage0",
            "path('blocks', 'segments', range(1, 4)) stage1",
        ]

    def test_stacked_layers_are_divided_evenly_if_they_can_be(self):
        model = nnx.Dict(blocks=models.ScanNet(depth=6, rngs=nnx.Rngs(0)).stacks[0])
        (rule,) = pipeline_sharding(model, 2).rules
        assert (rule[0].name, rule[0].sizes_of(6)) == ("stage0, stage1", (3, 3))
        one = nnx.Dict(blocks=Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 6, rngs=nnx.Rngs(0)))
        placement = pipeline_sharding(one, 3)
        assert placement.filters == (mm.path("blocks", "segments", 0),)
        assert placement.rules[0][0].sizes_of(6) == (2, 2, 2)

    def test_else_they_are_balanced_with_what_is_around_them(self):
        model = nnx.eval_shape(make(models.ScanNet, stages=1, depth=7))
        placement = pipeline_sharding(model, 3, "stacks")
        assert placement.filters == (mm.path("first"), mm.path("stacks", 0), mm.path("last"))
        assert placement.rules[1][0].sizes == (2, 3, 2)
        by_time = pipeline_sharding(model, 3, "stacks", weights=[4, 1, 1, 1, 1, 2, 2])
        assert by_time.rules[1][0].sizes == (1, 4, 2)

    def test_several_stacks_share_the_stages(self):
        model = nnx.eval_shape(make(models.ScanNet, stages=2, depth=4))
        evenly = pipeline_sharding(model, 4, "stacks")
        assert [rule[0].name for rule in evenly.rules] == [
            "stage0",
            "stage0, stage1",
            "stage2, stage3",
            "stage3",
        ]
        unevenly = pipeline_sharding(nnx.eval_shape(make(models.ScanNet, stages=2, depth=5)), 4, "stacks")
        assert [rule[0].sizes for rule in unevenly.rules[1:3]] == [(2, 3), (3, 2)]

    def test_stacked_layers_with_a_scalar_each(self):
        """As the gates of ReZero (Bachlechner et al. 2020)."""

        class Gated(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(4, 4, rngs=rngs)
                self.gate = nnx.Param(jnp.zeros(()))

        blocks = nnx.vmap(lambda rngs: Gated(rngs))(nnx.Rngs(0).split(6))
        (rule,) = pipeline_sharding(nnx.Dict(blocks=blocks), 3).rules
        assert rule[0].sizes_of(6) == (2, 2, 2)

    @few(2)
    @pytest.mark.parametrize(
        "make",
        [
            lambda rngs: nnx.Linear(4, 4, rngs=rngs),
            lambda rngs: nnx.Conv(16, 3, (3, 3), rngs=rngs),
            lambda rngs: nnx.MultiHeadAttention(4, 4, decode=False, rngs=rngs),
            lambda rngs: nnx.Einsum("ab,bcd->acd", (4, 2, 4), (4,), rngs=rngs),
        ],
    )
    def test_a_single_layer_is_no_stack(self, make):
        """Though all its arrays have one leading dimension."""
        assert stacked_length(make(nnx.Rngs(0))) is None
        several = nnx.vmap(make)(nnx.Rngs(0).split(5))
        assert stacked_length(several) == 5

    def test_too_few_stacked_layers(self):
        model = nnx.Dict(blocks=models.ScanNet(depth=2, rngs=nnx.Rngs(0)).stacks[0])
        with pytest.raises(mm.PlacementError, match="2 layers are stacked in blocks, too few for 3 stages"):
            pipeline_sharding(model, 3)
        with pytest.raises(ValueError, match="weights= has 1 numbers, and there are 2 layers"):
            pipeline_sharding(model, 2, weights=[1])

    def test_stacked_layers_beside_lists_of_layers(self):
        net = models.ScanNet(rngs=nnx.Rngs(0))
        model = nnx.Dict(stack=net.stacks[0], list=nnx.List([net.first, net.last]))
        with pytest.raises(mm.PlacementError, match="stacked layers in 'stack' and lists of layers as well"):
            pipeline_sharding(model, 2, ["stack", "list"])


class Tied(nnx.Module):
    """The embedding again under a name that Flax comes to first, though it was made last."""

    def __init__(self):
        self.embed = nnx.Embed(6, 2, rngs=nnx.Rngs(0))
        self.blocks = nnx.List(linear(2, seed) for seed in range(2))
        self.attend = self.embed
        self.head = linear(2)


class Looped(nnx.Module):
    """One block called at several depths, as in ALBERT, and another."""

    def __init__(self):
        shared = linear(2)
        self.blocks = nnx.List([shared, linear(2, 1), shared, shared])


class TestShared:
    def test_lives_with_the_first_that_holds_it_and_counts_once(self):
        placement = pipeline_sharding(Tied(), tasks(2))
        assert layout(placement) == [
            "path('embed') t0",
            "path('blocks', 0) t0",
            "path('blocks', 1) t1",
            "path('head') t1",
        ]
        model = mm.jit(Tied, out_shardings=placement)()
        assert model.attend is model.embed
        assert model.embed.embedding[...].devices() == {jax.devices()[0]}

    def test_layers_that_are_others_again_cannot_fill_a_stage(self):
        assert layout(pipeline_sharding(Looped(), 2)) == [
            "path('blocks', 0) stage0",
            "path('blocks', 1) stage1",
        ]
        with pytest.raises(
            mm.PlacementError,
            match=r"2 of 4 layers in blocks hold state of their own, too few for 3 stages \(what is in "
            r"blocks.2 is in blocks.0 too, which was made first\): use fewer",
        ):
            pipeline_sharding(Looped(), 3)

    def test_keys_outside_of_the_layers_are_left_to_every_stage(self):
        model = Chain(1, 1)
        model.rngs = nnx.Rngs(0)
        assert "rngs" not in str(pipeline_sharding(model, 2))
        assert layout(pipeline_sharding(model, 2, last="rngs"))[-1] == "path('rngs') stage1"


class Plain(nnx.Module, pytree=False):
    def __init__(self):
        self.start = linear(1)
        self.blocks = nnx.List([linear(1), linear(1)])
        self.end = linear(1)


class TestRefuses:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                dict(stages=3),
                r"2 of 2 layers in blocks hold state of their own, too few for 3 stages: use fewer",
            ),
            (
                dict(layers="blcoks"),
                r"layers= has 'blcoks', and Chain has no 'blcoks' \(did you mean 'blocks'\?\)",
            ),
            (dict(layers="layers"), r"Chain has no 'layers': it has embed, blocks, head"),
            (
                dict(layers="blocks.2.kernel"),
                r"layers= has 'blocks.2.kernel', and blocks has no '2': it has 0, 1",
            ),
            (dict(layers="head.kernel.x"), r"and head.kernel has no 'x': it has nothing"),
            (dict(layers="head"), r"layers= has 'head', a Linear and no list of layers"),
            (dict(first="emebd"), r"first= has 'emebd', and Chain has no 'emebd' \(did you mean 'embed'\?\)"),
            (dict(last=["head", "x"]), r"last= has 'x', and Chain has no 'x'"),
            (
                dict(first="head", last="head"),
                r"head of last= lies in head of first=: each part .* one place",
            ),
            (dict(first=["embed", "embed"]), r"embed of first= lies in embed of first="),
            (
                dict(first="blocks"),
                r"blocks of first= lies in blocks of layers=|blocks of layers= lies in blocks",
            ),
            (dict(last="blocks.1"), r"blocks.1 of last= lies in blocks of layers="),
            (dict(layers=["blocks", "blocks"]), r"blocks of layers= lies in blocks of layers="),
            (dict(first=[]), r"embed would live nowhere: name it in first= or last="),
            (dict(first=[], last=[]), r"embed, head would live nowhere"),
            (dict(first="head", last=[]), r"embed would live nowhere"),
            (dict(weights=[1, 1, 1]), r"weights= has 3 numbers, and there are 2 layers"),
            (dict(weights=[1, -1]), r"weights= are finite and not negative, and has -1"),
            (dict(weights=[math.nan, math.inf]), r"weights= are finite and not negative, and has nan, inf"),
            (dict(stages=0), r"at least one stage, not 0"),
            (dict(stages=[]), r"stages= has no Task"),
            (
                dict(stages=tasks(2), rules=logical_rules("tensor")),
                r"give your own Tasks logical_axes= instead",
            ),
        ],
    )
    def test_what_does_not_fit(self, options, message):
        with pytest.raises(ValueError, match=message):
            pipeline_sharding(Chain(1, 1, vocab=2, out=2), **dict(stages=2) | options)

    def test_stages_that_are_no_tasks(self):
        for stages in (["stage0", "stage1"], 2.0):
            with pytest.raises(TypeError, match="stages= is how many, or a sequence of Tasks"):
                pipeline_sharding(Chain(1, 1), stages)

    def test_what_depends_on_the_model_is_a_placement_error(self):
        for options in (dict(layers="x"), dict(first=[]), dict(last="blocks"), dict(stages=3)):
            with pytest.raises(mm.PlacementError):
                pipeline_sharding(Chain(1, 1, vocab=2), **dict(stages=2) | options)

    def test_an_order_that_is_lost(self):
        assert layout(pipeline_sharding(Plain(), 2))[0] == "path('start') stage0"
        abstract = nnx.eval_shape(Plain)
        assert attribute_order(abstract) is None
        with pytest.raises(
            mm.PlacementError, match=r"order in which Plain.__init__ made its attributes is lost"
        ):
            pipeline_sharding(abstract, 2, first="start")
        found = layout(pipeline_sharding(abstract, 2, first="start", last="end"))
        assert {"path('start') stage0", "path('end') stage1"} < set(found)


class TestWarnings:
    def model(self):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"), eager_sharding=False)
        return nnx.Dict(
            blocks=nnx.List(nnx.Linear(2, 2, kernel_init=init, rngs=nnx.Rngs(i)) for i in range(2))
        )

    def test_a_rule_by_keyword_that_nothing_uses(self):
        with pytest.warns(
            UserWarning, match="a rule for 'heads', 'vocab', and no Variable of Dict has"
        ) as caught:
            pipeline_sharding(self.model(), 2, rules=logical_rules("tensor", heads=None, vocab="x", mlp="x"))
        assert caught[0].filename == __file__

    def test_slices_that_are_left_over(self):
        with mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model")):
            with pytest.warns(UserWarning, match=r"2 of the 4 slices .* idle: take stages=4, or") as caught:
                pipeline_sharding(self.model(), 2)
            assert caught[0].filename == __file__
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pipeline_sharding(self.model(), tasks(2))  # who gives Tasks may have others

    def test_no_word_about_presets_activations_and_rules_that_are_used(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline_sharding(
                self.model(), 2, rules=logical_rules("tensor", mlp=None, batch="data", sequence="x")
            )
            pipeline_sharding(self.model(), 2, rules={"heads": "model"})


class Hybrid(nnx.Module):
    """Layers of two kinds in turn between an embedding and a head, their weights with logical names."""

    def __init__(self, *, rngs: nnx.Rngs):
        def kernel(*axes):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes, eager_sharding=False)

        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List(
            models.Block(16, rngs=rngs)
            if i % 3
            else nnx.Linear(16, 16, kernel_init=kernel("embed", "mlp"), rngs=rngs)
            for i in range(4)
        )
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = (
                block(x, jnp.tri(x.shape[1], dtype=bool))
                if isinstance(block, models.Block)
                else jnp.tanh(block(x))
            )
        return self.embed.attend(self.norm(x))


class TestTrains:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("model", "stages", "options", "batch", "loss"),
        [
            (make(Hybrid), 3, {}, models.tokens(), models.cross_entropy),
            (make(models.AttentionNet), 2, dict(layers="layers"), models.tokens(), models.cross_entropy),
            (
                make(models.ScanNet, stages=3),
                2,
                dict(layers="stacks"),
                models.vectors(),
                models.squared_error,
            ),
        ],
        ids=["hybrid", "attention", "scan"],
    )
    def test_in_parity(self, model, stages, options, batch, loss):
        mesh, _ = pipeline(stages, 2)
        rules = logical_rules("tensor")
        placement = pipeline_sharding(nnx.eval_shape(model), stages, rules=rules, **options)
        how = dict(optimizer=optax.sgd(0.1), microbatch=4, steps=1)
        program = assert_parity(model, loss, batch, placement, mesh=mesh, **how)
        assert len({fragment.mesh for fragment in program.fragments}) == stages

    @pytest.mark.slow
    def test_born_where_it_lives_by_its_own_names_and_slots_of_the_optimizer_follow(self):
        mesh, _ = pipeline(2, 2)
        with mesh:
            placement = pipeline_sharding(nnx.eval_shape(make(Hybrid)), 2, rules=logical_rules("tensor"))
            model = mm.jit(make(Hybrid), out_shardings=placement)()
            optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))(model)
            assert model.blocks[0].kernel[...].sharding.spec == P(None, "model")
            for path, variable in nnx.to_flat_state(nnx.state(model)):
                where = placement.lookup(path, variable).sharding
                assert variable[...].sharding.is_equivalent_to(where, variable.ndim), path
        born, slots = homes(model), homes(optimizer)
        assert len(set(map(frozenset, born.values()))) == 2
        for slot in ("mu", "nu"):
            followed = {path: slots[f"['opt_state'][0]['{slot}']{path}"] for path in born}
            assert followed == born
