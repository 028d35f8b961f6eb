"""Where a model has its layers: attributes with numbers, lists in lists and side by side, parts of linen."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import mmnnx as mm
from mmnnx.sharding.pipeline import pipeline_sharding
from tests.sharding.layouts import layout, linear, real_abstract_and_jitted, stages_of, tasks


class Numbered(nnx.Module):
    """Layers that are attributes with numbers, each with a skip beside it."""

    def __init__(self, count: int = 12):
        self.lift = linear(2)
        for n in range(count):
            setattr(self, f"conv_{n}", linear(2, seed=n))
            setattr(self, f"skip_{n}", linear(1, seed=n, out=2))
        self.conv_width = 2
        self.project = linear(2)


class TwoLevels(nnx.Module):
    """Levels of blocks, each with something after its blocks."""

    def __init__(self):
        self.levels = nnx.List(
            nnx.Dict(blocks=nnx.List([linear(2), linear(2)]), down=linear(1)) for _ in range(2)
        )


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(x.shape[-1])(jnp.sin(linen.Dense(16)(x)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8, name="embed")(x)
        for _ in range(11):
            x = LinenBlock()(x)
        return linen.Dense(1, name="head")(x)


def linen_model():
    return nnx.bridge.ToNNX(LinenModel(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 4)))


class TestNumberedAttributes:
    def test_they_are_layers_in_the_order_of_their_numbers(self):
        """Ten comes after two; what was made between two layers lives with the one before."""
        for model in real_abstract_and_jitted(Numbered):
            stages = stages_of(model, pipeline_sharding(model, tasks(3), layers="conv_*"))
            for n in range(12):
                assert stages[f"conv_{n}.kernel"] == stages[f"skip_{n}.kernel"] == f"t{n // 4}"
            assert stages["lift.kernel"] == "t0"
            assert stages["project.kernel"] == "t2"

    def test_neighbours_are_one_rule(self):
        found = layout(pipeline_sharding(nnx.Dict({f"a{n}": linear(1) for n in range(4)}), 2, layers="a*"))
        assert found == ["path(('a0', 'a1')) stage0", "path(('a2', 'a3')) stage1"]

    def test_a_number_within_a_path_stands_for_several_lists(self):
        found = layout(pipeline_sharding(TwoLevels(), 4, layers="levels.*.blocks"))
        assert found == [
            "path('levels', 0, 'blocks', 0) stage0",
            "path('levels', 0, 'blocks', 1) stage1",
            "path('levels', 0, 'down') stage1",
            "path('levels', 1, 'blocks', 0) stage2",
            "path('levels', 1, 'blocks', 1) stage3",
            "path('levels', 1, 'down') stage3",
        ]

    def test_the_parts_of_a_linen_module(self):
        """They are sorted by name: the first and the last are to be named. Then it runs as the whole does."""
        with pytest.raises(
            mm.PlacementError,
            match=r"linen module in alphabetical order: first= or last= has to name embed, head",
        ):
            pipeline_sharding(linen_model(), 4, layers="LinenBlock_*")
        placement = pipeline_sharding(linen_model(), 4, layers="LinenBlock_*", first="embed", last="head")
        mesh = mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data"))
        assert "path('LinenBlock_10') stage3" in layout(placement)
        x = jax.random.normal(jax.random.key(0), (8, 4))
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        whole_loss, whole = nnx.jit(grad_fn)(linen_model(), x)
        with mesh:
            model = mm.jit(linen_model, out_shardings=placement)()
            in_parts = mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean", schedule="1f1b")
            loss, grads = mm.jit(in_parts)(model, x)
        np.testing.assert_allclose(loss, whole_loss, rtol=1e-5)
        for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ("conf_*", r"Numbered has no 'conf_\*' with a number for the '\*': it has lift, conv_0, skip_0,"),
            ("convs", r"it has lift, .*; for conv_0, conv_1 and so on write 'conv_\*'"),
            (("conv_0", "conv_1"), r"a tuple is the keys of one path: .* write \['conv_0', 'conv_1'\]"),
            (["conv_*", "conv_*"], r"conv_0 of layers= lies in conv_0 of layers="),
        ],
    )
    def test_what_does_not_fit(self, layers, message):
        with pytest.raises(mm.PlacementError, match=message):
            pipeline_sharding(Numbered(2), 2, layers=layers)

    def test_none(self):
        for empty in ([], set()):
            with pytest.raises(mm.PlacementError, match="layers= is empty: give the path"):
                pipeline_sharding(Numbered(2), 2, layers=empty)

    def test_too_few(self):
        with pytest.raises(mm.PlacementError, match="2 of 2 layers in conv_0 to conv_1 hold state"):
            pipeline_sharding(nnx.Dict(conv_0=linear(1), conv_1=linear(1)), 3, layers="conv_*")


class SideBySide(nnx.Module):
    """Kernels in one list, what follows each in another, and one less in a third."""

    def __init__(self, count: int = 8):
        self.embed = linear(2)
        self.convs = nnx.List(linear(2, seed) for seed in range(count))
        self.norms = nnx.List(nnx.LayerNorm(2, rngs=nnx.Rngs(0)) for _ in range(count))
        self.skips = nnx.List(linear(2, seed) for seed in range(count - 1))
        self.head = linear(2)

    def __call__(self, x):
        x = self.embed(x)
        for n, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = jnp.sin(norm(conv(x))) + (self.skips[n](x) if n < len(self.skips) else 0)
        return self.head(x)


class TestListsSideBySide:
    def test_item_n_of_each_is_part_of_layer_n(self):
        for model in real_abstract_and_jitted(SideBySide):
            stages = stages_of(
                model, pipeline_sharding(model, tasks(4), layers={"convs", "norms", "skips"}, weights=[1] * 8)
            )
            for n in range(8):
                assert stages[f"convs.{n}.kernel"] == stages[f"norms.{n}.scale"] == f"t{n // 2}"
                assert n == 7 or stages[f"skips.{n}.kernel"] == f"t{n // 2}"
            assert stages["head.kernel"] == "t3"

    def test_they_are_balanced_together(self):
        """With a norm of 100 parameters to each of the last two layers, these have a stage each."""
        model = nnx.Dict(
            a=nnx.List(linear(1) for _ in range(4)),
            b=nnx.List(nnx.Param(jnp.ones(size)) for size in (1, 1, 100, 100)),
        )
        stages = stages_of(model, pipeline_sharding(model, tasks(3), layers={"a", "b"}))
        assert [stages[f"b.{n}"] for n in range(4)] == ["t0", "t0", "t1", "t2"]

    def test_nothing_is_sent_back(self):
        mesh = mm.MultiMesh(axis_sizes=(4,), axis_names=("stage",), devices=jax.devices()[:4])
        with mesh:
            placement = pipeline_sharding(SideBySide(), 4, layers={"convs", "norms", "skips"})
            model = mm.jit(SideBySide, out_shardings=placement)()
            text = str(mm.show_transfers(mm.jit(lambda model, x: model(x)).program(model, jnp.ones((4, 2)))))
        assert "stage3   stage" not in text
        assert "stage2   stage3" in text

    def test_of_each_level(self):
        level = lambda: nnx.Dict(a=nnx.List([linear(1), linear(1)]), b=nnx.List([linear(1), linear(1)]))
        model = nnx.Dict(levels=nnx.List([level(), level()]))
        found = layout(pipeline_sharding(model, 4, layers={"levels.*.a", "levels.*.b"}))
        assert [line for line in found if "'b'" in line] == [
            f"path('levels', {n // 2}, 'b', {n % 2}) stage{n}" for n in range(4)
        ]

    def test_stacked_layers(self):
        stack = lambda out: nnx.vmap(lambda rngs: nnx.Linear(4, out, use_bias=False, rngs=rngs), axis_size=4)(
            nnx.Rngs(0).split(4)
        )
        model = nnx.Dict(a=stack(5), b=stack(6))
        placement = pipeline_sharding(model, 2, layers={"a", "b"})
        assert list(map(str, placement.filters)) == ["path('a')", "path('b')"]
        for between, _ in placement.rules:
            assert [task.name for task in between.tasks] == ["stage0", "stage1"]

    def test_a_list_that_is_forgotten(self):
        with pytest.warns(UserWarning, match=r"skips has 7 items beside the 8 layers of convs") as caught:
            pipeline_sharding(SideBySide(), 4, layers={"convs", "norms"})
        assert "layers={..., 'skips'}; else name 'skips' in first= or last=" in str(caught[0].message)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline_sharding(SideBySide(), 4, layers={"convs", "norms"}, last=["skips", "head"])
            pipeline_sharding(SideBySide(), 1, layers="convs")

    def test_lists_of_each_level_that_are_forgotten(self):
        level = lambda: nnx.Dict(a=nnx.List([linear(1), linear(1)]), b=nnx.List([linear(1), linear(1)]))
        model = nnx.Dict(levels=nnx.List([level(), level()]))
        with pytest.warns(UserWarning) as caught:
            pipeline_sharding(model, 4, layers="levels.*.a")
        (said,) = (str(w.message) for w in caught)
        assert said.startswith("levels.0.b has 2 items beside the 2 layers of levels.0.a, and")
        assert said.endswith("layers={..., 'levels.*.b'}; else name 'levels.0.b' in first= or last=")
        with pytest.warns(
            UserWarning, match=r"norms has 2 items .* layers={..., 'norms'}; else name 'norms'"
        ):
            pipeline_sharding(
                nnx.Dict(
                    levels=nnx.List([nnx.Dict(a=nnx.List([linear(1), linear(1)])) for _ in range(2)]),
                    norms=nnx.List([linear(1), linear(1)]),
                ),
                4,
                layers="levels.*.a",
            )
        with pytest.raises(mm.PlacementError, match=r"not as many: 'levels.\*.a' is 2, 'levels.1.b' is 1"):
            pipeline_sharding(model, 4, layers={"levels.*.a", "levels.1.b"})

    def test_what_does_not_fit(self):
        with pytest.raises(
            mm.PlacementError, match="convs with head side by side, and not all of them are lists"
        ):
            pipeline_sharding(SideBySide(), 2, layers={"convs", "head"})
        with pytest.raises(mm.PlacementError, match=r"8 layers in convs with norms hold state .* 9 stages"):
            pipeline_sharding(SideBySide(), 9, layers={"convs", "norms"}, last=["skips", "head"])
