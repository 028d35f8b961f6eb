"""The compiler contexts of multimesh.jax: what each does, its default, and that it ends where it ends."""

from __future__ import annotations

import contextlib
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmnnx as mm
from mmnnx.mpmd.place.options import fusing, recomputing
from mmnnx.sharding.logical import autosharding
from mmnnx.sharding.task_scope import ignoring
from multimesh_compat.jax.contexts import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    fast_path,
    ignore_transforms,
    only_fuse_loop_tasks,
)
from multimesh_compat.jax.jitted import mjit
from multimesh_compat.jax.parallel import parallelize
from multimesh_compat.jax.tasks import task

# Each context, what it sets, and the values of that by default, switched on, and switched off.
CONTEXTS = {
    "autoshard": (autoshard, autosharding.get, None, True, False),
    "enable_recomputation": (enable_recomputation, recomputing.get, True, True, False),
    "enable_fast_path": (enable_fast_path, fast_path, True, True, False),
    "ignore_transforms": (ignore_transforms, ignoring.get, False, True, False),
    "enable_task_fusion": (enable_task_fusion, fusing.get, "unsaid", "all", "none"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_on_by_default_and_off_again(name):
    manager, get, default, on, off = CONTEXTS[name]
    assert get() == default
    with manager():
        assert get() == on
        with manager(False):
            assert get() == off
            with manager(True):
                assert get() == on
            assert get() == off
        assert get() == on
    assert get() == default


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", CONTEXTS)
def test_left_by_an_exception(name, value):
    manager, get, default, on, off = CONTEXTS[name]
    with pytest.raises(RuntimeError, match="inside"), manager(value):
        assert get() == (on if value else off)
        raise RuntimeError("inside")
    assert get() == default


@pytest.mark.parametrize("name", CONTEXTS)
def test_other_threads_are_not_in_it(name):
    manager, get, default, _, off = CONTEXTS[name]
    seen = []
    with manager(off == default):  # the other value
        assert get() != default
        thread = threading.Thread(target=lambda: seen.append(get()))
        thread.start()
        thread.join()
    assert seen == [default]


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_value_takes_effect_instead_of_the_first_argument(name):
    manager, get, default, on, off = CONTEXTS[name]
    assert list(inspect.signature(manager).parameters)[1:] == ["context_value"]
    with manager(True, False):
        assert get() == off
        with manager(False, context_value=True):
            assert get() == on
        for as_it_is in (manager(None), manager(True, None), manager(context_value=None)):
            with as_it_is:
                assert get() == off
    with manager(None):
        assert get() == default


def test_fusion_limited_to_loops():
    with only_fuse_loop_tasks():  # of the fusion that parallelize has by default
        assert fusing.get() == "loops"
        with enable_task_fusion():
            assert fusing.get() == "loops"
            with only_fuse_loop_tasks(False):
                assert fusing.get() == "all"
            with only_fuse_loop_tasks(None), only_fuse_loop_tasks(False, None):
                assert fusing.get() == "loops"
            with enable_task_fusion(False):
                assert fusing.get() == "none"
                with only_fuse_loop_tasks(context_value=True):
                    assert fusing.get() == "none"
        assert fusing.get() == "loops"
    with enable_task_fusion():
        with only_fuse_loop_tasks():
            assert fusing.get() == "loops"
            with enable_task_fusion():
                assert fusing.get() == "loops"
        assert fusing.get() == "all"
        with pytest.raises(RuntimeError, match="inside"), only_fuse_loop_tasks():
            raise RuntimeError("inside")
        with enable_task_fusion():
            assert fusing.get() == "all"
    assert fusing.get() == "unsaid"


# context


def state():
    return {name: get() for name, (_, get, *_) in CONTEXTS.items()}


def test_context_has_an_argument_for_each():
    parameters = inspect.signature(context).parameters.values()
    assert {p.name for p in parameters} == {*CONTEXTS, "only_fuse_loop_tasks"}
    assert all(p.default is None for p in parameters)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", CONTEXTS)
def test_context_opens_what_is_given_and_nothing_else(name, value):
    before = state()
    _, _, _, on, off = CONTEXTS[name]
    with context(**{name: value}):
        assert state() == before | {name: on if value else off}
    assert state() == before


def test_context_of_several():
    before = state()
    with context(False, False, False, True, True, True):  # in the documented order
        assert state() == {
            "autoshard": False,
            "enable_recomputation": False,
            "enable_fast_path": False,
            "ignore_transforms": True,
            "enable_task_fusion": "loops",
        }
        with context(enable_recomputation=True, only_fuse_loop_tasks=False):
            assert recomputing.get() and fusing.get() == "all" and not fast_path()
    assert state() == before


def test_context_of_nothing_leaves_what_is_set_around():
    with enable_recomputation(False), context():
        assert recomputing.get() is False


def test_context_is_left_by_an_exception():
    before = state()
    with pytest.raises(RuntimeError, match="inside"), context(True, False, False, True, True):
        raise RuntimeError("inside")
    assert state() == before


# What they do to a program

KERNELS = {name: jnp.eye(4) * (n + 1) / 3 for n, name in enumerate("abcd")}
X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


def layer(kernel, x):
    return jnp.tanh(x @ kernel)


def chain(kernels, x):
    """Four tasks: two on devices 0 and 1, two on 2 and 3."""
    for name, devices in zip("abcd", ([0, 1], [0, 1], [2, 3], [2, 3])):
        x = task(layer, name, devices=devices)(kernels[name], x)
    return jnp.sum(x**2)


def masked_chain(kernels, x):
    """Two tasks on different devices that both need a mask made of the batch."""
    mask = jnp.cumsum(x, axis=-1) > 0

    def of(name, devices):
        return task(lambda kernel, y: jnp.where(mask, layer(kernel, y), y), name, devices=devices)

    return jnp.sum(of("b", [2, 3])(kernels["b"], of("a", [0, 1])(kernels["a"], x)))


def names(fun, *args):
    return [fragment.name for fragment in mm.jit(fun).program(*args).fragments]


def test_fusion_makes_one_program_of_neighbours():
    expected = mm.jit(chain)(KERNELS, X)
    assert names(chain, KERNELS, X) == ["a", "b", "c", "d"]
    with enable_task_fusion():
        assert names(chain, KERNELS, X) == ["a+b", "c+d"]
        np.testing.assert_allclose(mm.jit(chain)(KERNELS, X), expected, rtol=1e-6)
        with only_fuse_loop_tasks():
            assert names(chain, KERNELS, X) == ["a", "b", "c", "d"]


def apart(kernels, x):
    """Four tasks as in `chain`, all of them on devices 0 and 1."""
    for name in "abcd":
        x = task(layer, name, devices=[0, 1])(kernels[name], x)
    return jnp.sum(x**2)


@pytest.mark.parametrize("fun, whole", [(chain, ["a+b", "c+d"]), (apart, ["a"])])
def test_parallelize_fuses_unless_it_is_told_not_to(fun, whole):
    sharded, sharded_init, get_batch = parallelize(fun, lambda: KERNELS, lambda: X)
    arguments = sharded_init(), get_batch()
    fused = lambda f: [fragment.name for fragment in f.program(*arguments).fragments]
    assert fused(sharded) == fused(mjit(fun)) == whole
    with enable_task_fusion(False):
        assert fused(sharded) == fused(mjit(fun)) == ["a", "b", "c", "d"]
        np.testing.assert_allclose(sharded(*arguments), fun(KERNELS, X), rtol=1e-6)
    np.testing.assert_allclose(sharded(*arguments), fun(KERNELS, X), rtol=1e-6)


def test_fusion_in_loops():
    def both(kernels, x):
        return mm.microbatch(jax.value_and_grad(chain), 0, 2, argnum=1)(kernels, x), chain(kernels, x)

    with context(enable_task_fusion=True, only_fuse_loop_tasks=True):
        found = {f.task for f in mm.jit(both).program(KERNELS, X).fragments}
    assert found >= {"a", "b", "c", "d", "a+b", "c+d"}


@pytest.mark.parametrize(
    "how", [contextlib.nullcontext(), enable_recomputation(False), enable_recomputation(True, False)]
)
def test_recomputation(how):
    """By default both tasks make the mask; else one does, and it is sent."""
    default = isinstance(how, contextlib.nullcontext)
    with how:
        program = mm.jit(masked_chain).program(KERNELS, X)
    makers = [f for f in program.fragments if any(e.primitive.name == "cumsum" for e in f.jaxpr.eqns)]
    assert len(makers) == (2 if default else 1)
    assert any(t.dtype == jnp.bool_ for t in program.transfers) != default


def test_ignored_transforms_run_on_one_device():
    step = mm.jit(jax.grad(chain))
    wanted = step(KERNELS, X)
    assert len({d for leaf in jax.tree.leaves(wanted) for d in leaf.devices()}) > 1
    with ignore_transforms():
        grads = step(KERNELS, X)
    assert {d for leaf in jax.tree.leaves(grads) for d in leaf.devices()} == {jax.devices()[0]}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads, wanted)
