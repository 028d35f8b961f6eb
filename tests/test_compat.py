"""What mmnnx takes from JAX and Flax without a promise: each still is what `mmnnx._compat` thinks it is.

A test that fails here after an upgrade says which entry of `_compat` to mend.
"""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from jax import lax
from jax._src import monitoring
from jax._src.mesh import thread_resources
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx import _compat
from tests.environment import environment

CONSTANT = np.arange(3, dtype=np.float32)


def with_constant(x):
    return jnp.sin(x) * jnp.asarray(CONSTANT) + jax.jit(jnp.cos)(x)


@pytest.fixture
def closed():
    return jax.make_jaxpr(with_constant)(jnp.ones(3))


def find(jaxpr, name):
    """The first equation of a primitive, in a jaxpr or in those inside it."""
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        if eqn.primitive.name == name:
            return eqn
        for inner in _compat.subjaxprs(eqn):
            if (found := find(inner, name)) is not None:
                return found
    return None


def test_every_function_is_tested_here():
    own = [name for name, f in vars(_compat).items() if getattr(f, "__module__", "") == _compat.__name__]
    here = inspect.getsource(inspect.getmodule(test_every_function_is_tested_here))
    untested = [name for name in own if not re.search(rf"_compat\.{name}\b", here)]
    assert not untested


def test_graphs_are_compared_without_asking_the_same_object():
    """Such as a tracer of an earlier trace: NNX keeps it in the definition, as all that is no state."""

    def make(value, layers=1, name="kept"):
        model = nnx.Dict(layers=nnx.List(nnx.Variable(0.0) for _ in range(layers)))
        setattr(model, name, nnx.static(value))
        return nnx.graphdef(model)

    kept = []
    jax.make_jaxpr(lambda x: kept.append(x))(0.0)
    (tracer,) = kept
    assert _compat.same_graph(make(tracer), make(tracer))
    for other in (make(tracer, layers=2), make(tracer, name="other")):
        assert not _compat.same_graph(make(tracer), other)
    assert _compat.same_graph(make("one"), make("one")) and not _compat.same_graph(make("one"), make("two"))


def test_jaxpr_types(closed):
    """What make_jaxpr returns and what equations hold are jaxprs by these types, and nothing else is."""
    assert isinstance(closed, _compat.JAXPR_TYPES), type(closed)
    assert isinstance(getattr(closed, "jaxpr", closed), _compat.JAXPR_TYPES)
    assert not isinstance(closed.eqns[0], _compat.JAXPR_TYPES)


def test_open_jaxpr(closed):
    """Inputs, results, equations and constants with their values, for a closed jaxpr."""
    invars, outvars, eqns, consts = _compat.open_jaxpr(closed)
    assert len(invars) == len(outvars) == 1 and invars[0].aval.shape == (3,)
    assert eqns[0].primitive.name == "sin" and eqns[-1].outvars == outvars
    assert [np.asarray(value).tolist() for _, value in consts] in ([], [CONSTANT.tolist()])
    read = {a for e in eqns for a in e.invars if not isinstance(a, jex.Literal)}
    assert read <= {*invars, *(v for v, _ in consts), *(v for e in eqns for v in e.outvars)}, (
        "an equation reads what is neither input, constant nor result"
    )


def test_open_jaxpr_of_an_open_one():
    """The body of a checkpointed function is an open jaxpr without constants."""
    closed = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(x) * 2))(1.0)
    (eqn,) = _compat.open_jaxpr(closed)[2]
    (body,) = _compat.subjaxprs(eqn)
    invars, outvars, eqns, consts = _compat.open_jaxpr(body)
    assert (len(invars), len(outvars), consts) == (1, 1, [])
    assert [e.primitive.name for e in eqns] == ["sin", "mul"]


def test_close_jaxpr(closed):
    """Parts taken from one jaxpr make another that can be evaluated; constants have become inputs."""
    invars, outvars, eqns, consts = _compat.open_jaxpr(closed)
    made = _compat.close_jaxpr([*invars, *(v for v, _ in consts)], outvars, eqns)
    assert isinstance(made, _compat.JAXPR_TYPES)
    assert not _compat.open_jaxpr(made)[3]
    x = jnp.linspace(0.0, 1.0, 3)
    (y,) = jax.jit(jex.jaxpr_as_fun(made))(x, *(value for _, value in consts))
    np.testing.assert_allclose(y, with_constant(x), rtol=1e-6)


def test_close_jaxpr_of_nothing():
    x = jax.make_jaxpr(jnp.sin)(1.0)
    (var,), _, _, _ = _compat.open_jaxpr(x)
    made = _compat.close_jaxpr([var], [var], [])
    assert jex.jaxpr_as_fun(made)(2.0) == [2.0]


def test_close_jaxpr_keeps_effects():
    """An equation with an effect (here a callback) makes the jaxpr one with it, so that XLA keeps it."""
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x + 1

    made = _compat.close_jaxpr(*_compat.open_jaxpr(jax.make_jaxpr(f)(1.0))[:3])
    assert made.effects
    jax.block_until_ready(jax.jit(jex.jaxpr_as_fun(made))(2.0))
    jax.effects_barrier()
    assert seen == [2.0]


def test_close_jaxpr_gives_no_deprecation_warning(closed, recwarn):
    invars, outvars, eqns, consts = _compat.open_jaxpr(closed)
    _compat.close_jaxpr([*invars, *(v for v, _ in consts)], outvars, eqns)
    assert not [str(w.message) for w in recwarn if issubclass(w.category, DeprecationWarning)]


def sines_to_cosines(eqn):
    if eqn.primitive.name != "sin":
        return eqn
    return find(jax.make_jaxpr(jnp.cos)(jnp.ones(3)), "cos").replace(invars=eqn.invars, outvars=eqn.outvars)


def test_map_equations(closed):
    """Equations are replaced, the rest stays; a jaxpr in which nothing changes is the same object."""
    changed = _compat.map_equations(closed, sines_to_cosines)
    x = jnp.linspace(0.0, 1.0, 3)
    np.testing.assert_allclose(jex.jaxpr_as_fun(changed)(x)[0], jnp.cos(x) * CONSTANT + jnp.cos(x), rtol=1e-6)
    assert find(closed, "sin") is not None, "the original was changed"
    assert _compat.map_equations(closed, lambda e: e) is closed


def test_map_equations_of_an_open_one():
    (eqn,) = _compat.open_jaxpr(jax.make_jaxpr(jax.checkpoint(jnp.sin))(jnp.ones(3)))[2]
    (body,) = _compat.subjaxprs(eqn)
    changed = _compat.map_equations(body, sines_to_cosines)
    assert type(changed) is type(body)
    assert [e.primitive.name for e in _compat.open_jaxpr(changed)[2]] == ["cos"]
    assert _compat.map_equations(body, lambda e: e) is body


def test_map_inner_equations():
    """Those of the bodies alone, be they one or several; an equation in which nothing changes is the same."""
    x = jnp.linspace(0.0, 1.0, 3)
    for fun in (jax.checkpoint(jnp.sin), lambda x: jax.lax.cond(x[0] < 1, jnp.sin, jnp.tanh, x)):
        *_, eqn = _compat.open_jaxpr(jax.make_jaxpr(fun)(x))[2]
        changed = _compat.map_inner_equations(eqn, sines_to_cosines)
        names = [_compat.open_jaxpr(body)[2][0].primitive.name for body in _compat.subjaxprs(changed)]
        assert "cos" in names and "sin" not in names and len(names) == len(_compat.subjaxprs(eqn))
        assert _compat.map_inner_equations(eqn, lambda e: e) is eqn
    (sine,) = _compat.open_jaxpr(jax.make_jaxpr(jnp.sin)(x))[2]
    assert _compat.map_inner_equations(sine, sines_to_cosines) is sine


@jax.custom_vjp
def custom(x):
    return jnp.sin(x)


custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.parametrize(
    "primitive, fun, bodies",
    [
        (("jit", "pjit"), jax.jit(jnp.sin), 1),
        (("scan",), lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0], 1),
        (("while",), lambda x: jax.lax.while_loop(lambda x: x < 1, jnp.sin, x), 2),
        (("cond",), lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 2),
        (("remat2", "checkpoint", "remat"), jax.checkpoint(jnp.sin), 1),
        (("custom_vjp_call", "custom_vjp_call_jaxpr"), custom, 1),
        (("custom_jvp_call",), jax.nn.relu, 1),
    ],
    ids=["jit", "scan", "while", "cond", "remat", "custom_vjp", "custom_jvp"],
)
def test_subjaxprs(primitive, fun, bodies):
    """The primitives that mmnnx looks into hold their bodies as jaxprs among their parameters."""
    jaxpr = jax.make_jaxpr(fun)(0.5)
    eqn = next((e for name in primitive if (e := find(jaxpr, name)) is not None), None)
    assert eqn is not None, f"none of {primitive} in {jaxpr}"
    found = _compat.subjaxprs(eqn)
    assert len(found) == bodies, eqn
    assert all(isinstance(j, _compat.JAXPR_TYPES) for j in found)
    assert any(len(_compat.open_jaxpr(j)[2]) for j in found)


def test_subjaxprs_of_a_plain_equation():
    assert _compat.subjaxprs(find(jax.make_jaxpr(jnp.sin)(1.0), "sin")) == []


def test_scan_counts():
    """Constants first, then carries, then what is sliced: in that order among the inputs."""

    def f(consts, carry, xs):
        def body(carry, x):
            a, b = carry
            return (a * consts[0] + x, b + consts[1] + consts[2]), a

        return jax.lax.scan(body, carry, xs)

    consts = (jnp.ones((1,)), jnp.ones((2,)), jnp.ones((2,)))
    eqn = find(jax.make_jaxpr(f)(consts, (jnp.ones((1,)), jnp.ones((2,))), jnp.ones((7, 1))), "scan")
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    assert (num_consts, num_carry) == (3, 2)
    assert [a.aval.shape for a in eqn.invars[num_consts + num_carry :]] == [(7, 1)]
    assert len(_compat.open_jaxpr(eqn.params["jaxpr"])[0]) == len(eqn.invars)
    assert eqn.params["length"] == 7 and eqn.params["reverse"] is False


def test_scan_counts_without_constants_and_without_carries():
    no_consts = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, length=2))(1.0)
    assert _compat.scan_counts(find(no_consts, "scan").params) == (0, 1)
    no_carry = jax.make_jaxpr(lambda a, x: jax.lax.map(lambda y: y * a, x))(2.0, jnp.ones(3))
    assert _compat.scan_counts(find(no_carry, "scan").params) == (1, 0)


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "model")])
def test_copy_to(spec):
    """A copy on other devices, sharded as asked, shard by shard; the original stays usable."""
    one, other = (Mesh(np.array(jax.devices()[n : n + 2]), ("model",)) for n in (0, 2))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    given = jax.device_put(x, NamedSharding(one, spec))
    target = NamedSharding(other, spec)
    copy, again = _compat.copy_to([given, given], [target, target])
    np.testing.assert_array_equal(again, x)
    assert copy.sharding == target and copy.committed
    assert (copy.shape, copy.dtype, copy.weak_type) == ((2, 4), jnp.float32, False)
    for mine, theirs in zip(given.addressable_shards, copy.addressable_shards, strict=True):
        assert mine.index == theirs.index and mine.device != theirs.device
    np.testing.assert_array_equal(copy, x)
    given.delete()
    np.testing.assert_array_equal(jnp.add(copy, 1), x + 1)


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.BatchStat(jnp.zeros(()))


def increment(counter, x):
    counter.count[...] += 1
    return x * 2


@pytest.mark.parametrize("options", [{}, {"graph": False}, {"graph_updates": False}])
def test_pure_function_and_its_replacement(options):
    """nnx.jit runs what is put in place of its jax.jit, on pytrees of arrays, and applies the updates."""
    jitted = nnx.jit(increment, **options)
    pure = _compat.pure_function(jitted)
    assert callable(pure) and not hasattr(pure, "lower"), "not the function below jax.jit"
    calls = []

    def replacement(*args, **kwargs):
        calls.append(jax.tree.leaves((args, kwargs)))
        return pure(*args, **kwargs)

    _compat.replace_pure_function(jitted, replacement)
    counter = Counter()
    assert float(jitted(counter, jnp.float32(3))) == 6
    assert float(counter.count[...]) == 1, "the update is lost"
    (leaves,) = calls
    assert sorted(map(float, leaves)) == [0, 3]


def test_nodes_stand_for_nnx_objects():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    traced = _compat.inner_stage(nnx.jit(lambda m, x: m(x)).trace(model, jnp.ones((1, 2))))
    (node, x), _ = traced.args_info
    assert isinstance(node, _compat.NODE)
    assert [a.shape for a in jax.tree.leaves(node)] == [(3,), (2, 3)]
    assert not isinstance(x, _compat.NODE)


def test_tree_states_stand_for_nnx_objects_without_updates_of_graphs():
    """And are made by nnx.prefix in graph mode, with what it was asked for in `.state`."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    traced = _compat.inner_stage(nnx.jit(lambda m: m.bias[...], graph_updates=False).trace(model))
    (node,), _ = traced.args_info
    assert isinstance(node, _compat.TREE_STATE)
    prefix = nnx.prefix(model, {nnx.PathContains("bias"): 1, ...: None}, graph=True)
    assert isinstance(prefix, _compat.TREE_STATE)
    assert dict(nnx.to_flat_state(prefix.state)) == {("bias",): 1, ("kernel",): None}
    alone = nnx.prefix(nnx.Param(jnp.zeros(1)), {...: 1}, graph=True)
    assert isinstance(alone, _compat.TREE_STATE) and alone.state == 1


def test_graph_modes():
    """As nnx.jit takes them: by its arguments, or as Flax is set."""
    graph, graph_updates = _compat.graph_modes(None, None)
    assert type(nnx.jit(increment)) is type(nnx.jit(increment, graph=graph, graph_updates=graph_updates))
    for modes in ((True, True), (True, False), (False, False)):
        with nnx.set_graph_mode(modes[0]), nnx.set_graph_updates(modes[1]):
            assert _compat.graph_modes(None, None) == modes
            assert _compat.graph_modes(True, True) == (True, True)


def test_attribute_order():
    """Of a module as it was made, and of one that was merged, where `vars` is sorted."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.zeroth = nnx.Linear(2, 2, rngs=rngs)
            self.first = nnx.Linear(2, 2, rngs=rngs)
            self.again = 3

    order = ["zeroth", "first", "again"]
    assert _compat.attribute_order(Model(nnx.Rngs(0))) == order
    assert _compat.attribute_order(nnx.eval_shape(lambda: Model(nnx.Rngs(0)))) == order


def test_data_attributes():
    class Model(nnx.Module):
        def __init__(self):
            self.weight, self.size, self.sizes = nnx.Param(jnp.ones(2)), 3, [4]
            self.parts = nnx.data({"bias": jnp.zeros(2)})

    class Graph(nnx.Module, pytree=False):
        def __init__(self):
            self.weight, self.size, self.sizes = nnx.Param(jnp.ones(2)), 3, [4]
            self.parts, self.table, self.norm = (
                {"bias": jnp.zeros(2)},
                np.ones(2),
                nnx.LayerNorm(2, rngs=nnx.Rngs(0)),
            )

    assert _compat.data_attributes(Model()) == ["weight", "parts"]
    assert _compat.data_attributes(Graph()) == ["weight", "sizes", "parts", "table", "norm"]
    for model in (Model(), Graph()):
        assert not jax.tree.leaves(vars(model)[_compat.CONSTRUCTION])
        static = {name for name, kind in nnx.graphdef(model).attributes if hasattr(kind, "value")}
        assert static & {*vars(model)} == {*vars(model)} - {
            *_compat.data_attributes(model),
            _compat.CONSTRUCTION,
        }


def test_notes_on_an_array_of_what_it_was_made_of():
    """`note_parts` and `noted_part`. They are gone with the array, and nothing else sees them."""
    meshes = [Mesh(np.array([d]), ("x",)) for d in jax.devices()[:2]]
    parts = [jax.device_put(jnp.float32(3), NamedSharding(m, P())) for m in meshes]
    whole = jax.device_put(jnp.float32(3), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P()))
    assert _compat.noted_part(whole, parts[0].sharding) is None
    _compat.note_parts(whole, parts)
    assert all(_compat.noted_part(whole, part.sharding) is part for part in parts)
    assert _compat.noted_part(whole, NamedSharding(meshes[0], P("x"))) is None
    assert _compat.noted_part(jax.device_put(whole, jax.devices()[0]), parts[0].sharding) is None
    assert _compat.noted_part(3, parts[0].sharding) is None
    key = jax.random.key(0)
    _compat.note_parts(key, [key])
    assert _compat.noted_part(key, key.sharding) is None
    reference = jax.new_ref(jnp.float32(0))
    _compat.hold(reference, whole)
    assert _compat.noted_part(whole, parts[0].sharding) is None
    _compat.note_parts(whole := jax.device_put(jnp.float32(3), whole.sharding), parts)
    held = weakref.ref(parts.pop())
    whole += 1
    assert held() is None


def test_metadata():
    variable = nnx.Param(jnp.ones(2), note="n")
    assert _compat.metadata(variable) == variable.get_metadata() == variable.get_metadata() | {"note": "n"}
    variable.set_metadata(note="m")
    assert _compat.metadata(variable)["note"] == "m"


def test_a_key_value_store():
    """`_compat.key_value_store`, in a process that has one to itself."""
    program = """
import socket
import jax
from mmnnx import _compat

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
try:
    _compat.key_value_store()
except RuntimeError as error:
    assert "mm.initialize" in str(error)
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
store = _compat.key_value_store()
store.key_value_set_bytes("a", b"1")
assert store.blocking_key_value_get_bytes("a", 1000) == b"1"
assert _compat.own_process() == (0, 1)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_under_jit():
    seen = []
    look = lambda x: seen.append(_compat.under_jit()) or x
    for transform in (jax.jit, jax.vmap, jax.grad, lambda f: f):
        transform(look)(jnp.ones(1) if transform is jax.vmap else 1.0)
    assert seen == [True, False, False, False]


def test_in_cached_partial():
    """True where `nnx.cached_partial` calls its function, and at no other time."""
    seen = []
    jitted = nnx.jit(increment)

    def watched(*args):
        seen.append(_compat.in_cached_partial())
        return jitted(*args)

    counter = Counter()
    watched(counter, jnp.float32(3))
    nnx.cached_partial(watched, counter)(jnp.float32(3))
    watched(counter, jnp.float32(3))
    assert seen == [False, True, False]
    assert float(counter.count[...]) == 3


@pytest.mark.parametrize("options", [{}, {"graph": False}])
def test_inner_stage(options):
    """`trace` of an nnx.jit whose function was replaced asks the replacement, and wraps what it gave."""
    jitted = nnx.jit(increment, **options)
    answer = jax.jit(_compat.pure_function(jitted))
    given = []

    class Replacement:
        def trace(self, *args, **kwargs):
            given.append(answer.trace(*args, **kwargs))
            return given[-1]

    _compat.replace_pure_function(jitted, Replacement())
    assert _compat.inner_stage(jitted.trace(Counter(), jnp.float32(3))) is given[0]


def test_is_optimizer_slot():
    """mu, nu and what else optax keeps; never a model's own state."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    slots = [v for _, v in nnx.iter_graph(optimizer.opt_state) if is_variable(v)]
    assert len(slots) == 5  # adam's count, and mu and nu of kernel and bias
    assert all(_compat.is_optimizer_state(v) for v in slots)
    assert not any(_compat.is_optimizer_state(v) for v in (model.kernel, model.bias, nnx.BatchStat(1)))
    assert not _compat.is_optimizer_state(jnp.ones(2))


def test_as_optimizer_state():
    """The same array, with the metadata that `nnx.Optimizer` gives it."""
    names = dict(out_sharding=("a", None), optimizer_sharding=(None, "a"), eager_sharding=False)
    init = nnx.with_metadata(nnx.initializers.ones, **names)
    kernel = nnx.Linear(2, 2, kernel_init=init, rngs=nnx.Rngs(0)).kernel
    held, like = _compat.as_optimizer_state(kernel), nnx.optimizer.to_opt_state(kernel)
    assert _compat.is_optimizer_state(held)
    assert held.get_metadata() == like.get_metadata()
    assert held.get_raw_value() is kernel.get_raw_value()
    x = jnp.ones(2)
    assert _compat.is_optimizer_state(_compat.as_optimizer_state(x))
    assert _compat.as_optimizer_state(x).get_raw_value() is x


def test_module_is_pytree():
    class Default(nnx.Module):
        pass

    class Inheriting(Default):
        pass

    class Plain(nnx.Module, pytree=False):
        pass

    assert [_compat.module_is_pytree(c) for c in (Default, Inheriting, Plain, nnx.Linear)] == [
        True,
        True,
        False,
        True,
    ]


def test_current_name_stack():
    """The scopes around what is being traced, as they will stand on the equations."""
    seen = []

    def f(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            seen.append(_compat.current_name_stack())
            return jnp.sin(x)

    assert _compat.current_name_stack() == ""
    jaxpr = jax.make_jaxpr(f)(1.0)
    assert seen == ["outer/inner"] == [str(find(jaxpr, "sin").source_info.name_stack)]


def test_current_name_stack_in_the_backward_rule_of_a_custom_vjp():
    """The rule runs outside the scope of its forward, which the name stack knows all the same."""
    seen = []

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def backward(x, g):
        seen.append(_compat.current_name_stack())
        return (g * jnp.cos(x),)

    f.defvjp(lambda x: (jnp.sin(x), x), backward)

    def scoped(x):
        with jax.named_scope("task[0:a]"):
            return f(x)

    jax.make_jaxpr(jax.grad(scoped))(1.0)
    assert seen and all("task[0:a]" in stack and "transpose(" in stack for stack in seen), seen


def test_trace_context():
    """It changes with what a trace depends on, and not without."""
    before = _compat.trace_context()
    with jax.default_matmul_precision("float32"):
        inside = _compat.trace_context()
    assert hash(before) == hash(_compat.trace_context()) and before == _compat.trace_context()
    assert inside != before


def test_source_line():
    """An equation tells the file and the function it was traced in."""

    def traced_here(x):
        return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(traced_here)(1.0).eqns
    line = _compat.source_line(eqn)
    assert "test_compat.py" in line and "traced_here" in line
    assert _compat._line("/home/me/model.py", 3) == "/home/me/model.py:3"


def test_compiled_takes_sub_byte_types():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x = jax.device_put(jnp.ones(8, jnp.int4), NamedSharding(mesh, P("x")))
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    if _compat.compiled_takes_sub_byte_types():
        assert compiled(x).dtype == jnp.int4
    else:
        with pytest.raises(ValueError, match="input layouts that disagree"):
            compiled(x)


CELL = """import jax
def traced_here(x):
    return jax.numpy.sin(x)
jaxpr = jax.make_jaxpr(traced_here)(1.0)
"""


@pytest.mark.slow
def test_source_line_in_a_notebook():
    """It is that of a cell: its file is a temporary one."""
    program = f"""
from IPython.core.interactiveshell import InteractiveShell
from mmnnx import _compat
shell = InteractiveShell.instance()
shell.run_cell({CELL!r}, store_history=True)
print(_compat.source_line(shell.user_ns["jaxpr"].eqns[0]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert ran.stdout.splitlines()[-1:] == ["cell In[1], line 3 (traced_here)"], ran.stderr


def test_is_saved():
    """The answers of every kind of policy that JAX has."""
    policies = jax.checkpoint_policies
    dot, add = jax.lax.dot_general_p, jax.lax.add_p
    assert _compat.is_saved(policies.dots_saveable(dot))
    assert not _compat.is_saved(policies.dots_saveable(add))
    both = policies.save_from_both_policies(policies.dots_saveable, policies.everything_saveable)
    assert _compat.is_saved(both(dot))
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=["away"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    name = jax.make_jaxpr(lambda x: checkpoint_name(x, "kept"))(1.0).eqns[0]
    assert _compat.is_saved(offload(name.primitive, **name.params))
    assert not _compat.is_saved(offload(add))
    with pytest.raises(ValueError, match="offloads"):
        _compat.is_saved(offload(name.primitive, name="away"))


def test_starting_several_processes():
    jax.devices()
    assert _compat.backends_are_initialized()
    given = ("h:1", 2, 1, [0])
    assert _compat.detect_cluster(*given, None, 1) == given
    assert _compat.copies_between_processes() is False  # on CPU


def test_weakly_typed():
    x = jax.device_put(jnp.float32(2), jax.devices()[0])
    weak = _compat.weakly_typed(x)
    assert not x.weak_type and weak.weak_type and weak.sharding == x.sharding and float(weak) == 2
    assert (weak * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_set_values():
    """What the first is refused, all are: a trace changes no Variable from outside."""
    variables = [nnx.Param(jnp.zeros(())), nnx.Param(jnp.ones(()))]
    _compat.set_values([(v, v.get_raw_value() + 2) for v in variables])
    assert [float(v[...]) for v in variables] == [2, 3]

    @jax.jit
    def inside(x):
        _compat.set_values([(v, x) for v in variables])

    with pytest.raises(errors.TraceContextError):
        inside(jnp.zeros(()))
    assert [float(v[...]) for v in variables] == [2, 3]


def test_set_note():
    """The Variable keeps it, and belongs to its trace as before; what is made from the Variable has none."""
    variable = nnx.Param(jnp.zeros(2), note="of its metadata")
    assert _compat.note(variable) is None
    trace = nnx.Param(jnp.zeros(2))._trace_state
    for note in ("one", "two"):
        _compat.set_note(variable, note)
        assert _compat.note(variable) == note and variable.note == "of its metadata"
    assert isinstance(variable._trace_state, _compat._Noted) and variable._trace_state == trace
    nnx.update(variable, nnx.Param(jnp.ones(2), other="metadata"))
    assert _compat.note(variable) == "two" and variable[0] == 1

    @jax.jit
    def inside(x):
        assert not _compat.can_update(variable)
        variable.set_value(x)

    with pytest.raises(errors.TraceContextError):
        inside(jnp.zeros(2))
    assert _compat.can_update(variable)
    for copied in (nnx.clone(variable), pickle.loads(pickle.dumps(variable))):
        assert _compat.note(copied) is None and copied._trace_state == trace
        copied.set_value(jnp.zeros(2))
    reference = nnx.Param(jnp.zeros(2), ref=True)
    _compat.set_note(reference, "nowhere")
    assert _compat.note(reference) is None


def test_is_traced(tmp_path):
    """Between start_trace and stop_trace, and at no other time."""
    assert not _compat.is_traced()
    with jax.profiler.trace(tmp_path):
        assert _compat.is_traced()
    assert not _compat.is_traced()


def test_persistent_cache(tmp_path, no_folder):
    """It is that of JAX: what is put there is in its folder."""
    assert _compat.persistent_cache() is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    _compat.persistent_cache().put("key", b"content")
    assert _compat.persistent_cache().get("key") == b"content"
    assert _compat.persistent_cache().get("another") is None
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")] == ["key-cache"]


def test_cache_hits(tmp_path, no_folder):
    """Of this thread, and after listeners were removed."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()

    def compile_it():
        jax.jit(lambda x: x * 3 - 1).lower(1.0).compile()

    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        before = _compat.cache_hits()
        compile_it()
        assert _compat.cache_hits() == before
        jax.monitoring.clear_event_listeners()
        assert _compat.cache_hits() == before
        assert monitoring.get_event_listeners() == [_compat._count_cache_hit]
        compile_it()
        assert _compat.cache_hits() == before + 1
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(_compat.cache_hits).result() == 0


def test_cache_environment():
    """The same in every process, and another one with another option for XLA."""
    program = "import jax; from mmnnx import _compat; print(_compat.cache_environment())"

    def found(flags):
        env = environment() | {"XLA_FLAGS": flags}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert found("") == found("") != found("--xla_cpu_enable_fast_math=true")


def test_load_serialized():
    """What was serialized for two devices runs on them and on two others, and takes over what is donated."""
    first, second = (Mesh(np.array(jax.devices()[n : n + 2]), ("x",)) for n in (0, 4))
    x = np.arange(8.0, dtype=np.float32)

    def lowered(mesh):
        here = jax.device_put(x, NamedSharding(mesh, P("x")))
        return here, jax.jit(lambda x: jnp.cumsum(x) * 2, donate_argnums=0).lower(here)

    here, program = lowered(first)
    compiled = program.compile()
    payload, _, _ = serialize_executable.serialize(compiled)
    expected = np.array(compiled(here))
    for mesh in (first, second):
        for like in (lowered(mesh)[1], compiled):
            there, _ = lowered(mesh)
            out = _compat.load_serialized(payload, [0, 1], like, mesh)(there)
            np.testing.assert_array_equal(out, expected)
            assert out.sharding.device_set == set(mesh.devices.flat)
            assert there.is_deleted() == here.is_deleted()


def test_children():
    """Those of Modules of both kinds and of what is no graph node, which `nnx.iter_children` leaves out."""

    class Holder(nnx.Module):
        def __init__(self):
            self.items = nnx.data([nnx.Param(jnp.ones(2)), {"x": jnp.ones(3)}])

    class Old(nnx.Module, pytree=False):
        def __init__(self):
            self.items = [nnx.Param(jnp.ones(2))]

    for holder in (Holder(), Old()):
        assert dict(_compat.children(holder))["items"] is holder.items
        assert [key for key, _ in nnx.iter_children(holder)] == []
        assert dict(_compat.children(holder.items))[0] is holder.items[0]
    assert [key for key, _ in _compat.children({"b": 1, "a": 2})] == ["a", "b"]
    assert [key for key, _ in _compat.children(nnx.state(Holder()))] == ["items"]
    assert _compat.children(jnp.ones(3)) == _compat.children(3) == []


def test_jit_is_disabled():
    assert not _compat.jit_is_disabled()
    with jax.disable_jit():
        assert _compat.jit_is_disabled()
        with jax.disable_jit(False):
            assert not _compat.jit_is_disabled()


def test_asked_transfers():
    here, there = (jax.sharding.SingleDeviceSharding(d) for d in jax.devices()[:2])
    x = jax.device_put(jnp.ones(3), here)
    with jax.transfer_guard("disallow"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed device-to-device"):
            _compat.copy_to([x], [there])
        with _compat.asked_transfers():
            (copy,) = _compat.copy_to([x], [there])
    assert copy.sharding == there


def test_the_source_line_of_what_flax_traced():
    """The line that called Flax, not the one inside it."""

    def traced_here(x):
        return nnx.cond(x > 0, jnp.sin, jnp.cos, x)

    assert "traced_here" in _compat.source_line(find(jax.make_jaxpr(traced_here)(1.0), "cond"))


def lean(fun, *args):
    """The one cond or while of a function without what nothing in it reads, and as it was."""
    (eqn,) = [e for e in jax.make_jaxpr(fun)(*args).eqns if e.primitive.name in ("cond", "while")]
    return _compat.without_dead(eqn), eqn


def run_equation(eqn, *args):
    return eqn.primitive.bind(*args, **eqn.params)


def test_solve_of():
    """A linear solve is what its solver is, over the operands that this closes over, and the right side."""

    def f(a, b):
        return lax.custom_linear_solve(lambda x: a * x, b, lambda _, b: b / a, lambda _, b: b / a)

    eqn = find(jax.make_jaxpr(f)(jnp.arange(1.0, 4.0), jnp.ones(3)), "custom_linear_solve")
    solve, operands = _compat.solve_of(eqn)
    assert [e.primitive.name for e in _compat.open_jaxpr(solve)[2]] == ["div"]
    assert len(operands) == 2 and len(_compat.open_jaxpr(solve)[0]) == 2
    assert operands[-1] is eqn.invars[-1]


def test_splash_attention_gradients():
    """What the public vjp of the kernel gives, which runs its forward again."""
    make = partial(
        splash.make_splash_mha,
        splash_masks.MultiHeadMask([splash_masks.CausalMask((128, 128))]),
        head_shards=1,
        q_seq_shards=1,
        interpret=True,
    )
    query, key, value, ct = jax.random.normal(jax.random.key(0), (4, 1, 128, 8))
    y, (log_total,) = make(save_residuals=True)(query, key, value)
    got = _compat.splash_attention_gradients(make(), query, key, value, y, log_total, ct)
    for a, b in zip(got, jax.vjp(make(), query, key, value)[1](ct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_one_by_one():
    eqn = find(jax.make_jaxpr(lambda a, b: jax.device_put((a, b)))(1.0, jnp.ones(3)), "device_put")
    assert len(eqn.invars) == 2
    parts = _compat.one_by_one(eqn)
    assert [v.aval.shape for part in parts for v in part.outvars] == [(), (3,)]
    for part in parts:
        jaxpr = jax.make_jaxpr(lambda x, part=part: part.primitive.bind(x, **part.params))(
            jnp.ones(part.invars[0].aval.shape)
        )
        assert _compat.open_jaxpr(jaxpr)[2][0].primitive is eqn.primitive


def test_without_dead_of_a_cond():
    x, w = jnp.ones(3), jnp.arange(3.0)
    branches = [lambda x, w, u: x, lambda x, w, u: x * w]
    new, old = lean(lambda n, x, w, u: jax.lax.switch(n, branches, x, w, u), 1, x, w, w)
    assert len(old.invars) == 4 and len(new.invars) == 3
    assert all(a is b for a, b in zip(new.invars, old.invars))
    for n in (0, 1):
        np.testing.assert_array_equal(run_equation(new, np.int32(n), x, w)[0], x * w if n else x)
    same, _ = lean(lambda p, x, w: jax.lax.cond(p, lambda: x, lambda: w), True, x, w)
    assert len(same.invars) == 3


def test_without_dead_of_a_while():
    """Constants of the condition and of the body that nothing needs go; carries stay."""
    x, w, u = jnp.full(3, 2.0), jnp.ones(3), jnp.ones((3, 3))

    def fun(x, w, u):
        more = lambda c: (c[1] < (u @ x).shape[0]) & (w[0] > 0)
        return jax.lax.while_loop(
            more, lambda c: (c[0] * (x + 0 * (u @ w).shape[0]), c[1] + 1, c[2]), (w, 0, 1.0)
        )

    new, old = lean(fun, x, w, u)
    assert [a.aval.shape for a in new.invars] == [(3,), (3,), (3,), ()]
    assert len(old.invars) > 4
    found = run_equation(new, w, x, w, 0)
    np.testing.assert_array_equal(found[0], x**3)
    assert int(found[1]) == 3


def test_dce():
    jaxpr = jax.make_jaxpr(lambda x, y, z: (jnp.sin(y), x + 1)[1])(1.0, 2.0, 3.0)
    small, used = _compat._dce(jaxpr)
    assert used == [True, False, False] and len(small.eqns) == 1 and len(small.in_avals) == 1
    small, used = _compat._dce(jaxpr, [False, True, False])
    assert used == [True, True, False] and len(small.in_avals) == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_is_ordered(ordered):
    def fun(x):
        jax.debug.print("{}", x, ordered=ordered)
        io_callback(lambda x: None, None, x, ordered=ordered)

    effects = jax.make_jaxpr(fun)(1.0).effects
    assert [_compat.is_ordered(effect) for effect in effects] == [ordered] * 2


def test_without_references():
    """What references hold goes in where they did, and comes out last; scopes stay."""

    def f(r, x):
        inner = jax.new_ref(x)
        with jax.named_scope("here"):
            r[...] += jnp.sin(x)
        return inner[...] + r[...]

    traced = jax.jit(f).trace(jax.ShapeDtypeStruct((3,), jnp.float32, is_ref=True), jnp.ones(3))
    assert _compat.makes_references(traced.jaxpr)
    assert not _compat.makes_references(jax.jit(jnp.sin).trace(1.0).jaxpr)
    pure = _compat.without_references(traced.jaxpr)
    assert [a.str_short() for a in pure.in_avals] == ["float32[3]"] * 2
    assert str(find(pure, "sin").source_info.name_stack) == "here"
    assert not pure.effects
    result, after = jex.jaxpr_as_fun(pure)(jnp.ones(3), jnp.zeros(3))
    np.testing.assert_array_equal((result, after), np.ones((2, 3)))


def test_what_references_hold():
    x = jnp.arange(3)
    reference = jax.new_ref(x)
    before = _compat.held(reference)
    assert isinstance(before, jax.Array) and before.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    other = jax.device_put(x + 1, jax.devices()[1])
    _compat.hold(reference, other)
    assert _compat.held(reference) is other and reference.sharding == other.sharding
    reference[...] += 1
    np.testing.assert_array_equal(reference[...], [2, 3, 4])
    assert reference[...].devices() == {jax.devices()[1]}
    assert _compat.held(x) is x
    jax.eval_shape(lambda r: pytest.fail() if _compat.held(r) is not r else None, reference)


def test_context_mesh():
    """Of both kinds of context, and while something is traced."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])
    assert _compat.context_mesh() is None
    with jax.set_mesh(mesh):
        found = []
        jax.eval_shape(lambda: found.append(_compat.context_mesh()))
        assert found == [mesh] and _compat.context_mesh() == mesh
    with pytest.warns(DeprecationWarning), mesh:
        assert _compat.context_mesh() == mesh


def test_enter_mesh():
    """It is what `with mesh:` is, and is left as that is, but does not warn."""

    def around():
        return _compat.context_mesh(), _compat.trace_context(), thread_resources.env.physical_mesh

    outer, inner = (jax.make_mesh((2,), (name,), devices=jax.devices()[:2]) for name in "xy")
    before = around()
    with pytest.warns(DeprecationWarning), outer:
        with inner:
            expected = around()
        outside = around()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _compat.enter_mesh(inner)
        assert around() == expected != outside
        inner.__exit__(None, None, None)
        assert around() == outside
    assert around() == before


def test_rewrite_jaxpr(closed):
    """Over other variables, and without the equations that are left out; constants stay."""
    env = {}

    def new(v):
        env[v] = jex.Var(v.aval)
        return env[v]

    def read(a):
        return env.get(a, a) if isinstance(a, jex.Var) else a

    def equations(eqn):
        if eqn.primitive.name == "sin":
            env[eqn.outvars[0]] = read(eqn.invars[0])
            return []
        return [eqn.replace(invars=list(map(read, eqn.invars)), outvars=list(map(new, eqn.outvars)))]

    changed = _compat.rewrite_jaxpr(closed, new, equations, read)
    assert isinstance(changed, type(closed)) and len(changed.eqns) == len(closed.eqns) - 1
    invars, outvars, _, consts = _compat.open_jaxpr(changed)
    before = _compat.open_jaxpr(closed)
    assert set(invars).isdisjoint(before[0]) and set(outvars).isdisjoint(before[1])
    assert len(consts) == 1 and consts[0][1] is before[3][0][1]
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jex.jaxpr_as_fun(changed)(x)[0], x * CONSTANT + jnp.cos(x), rtol=1e-6)
    inner = getattr(closed, "jaxpr", closed)
    assert isinstance(_compat.rewrite_jaxpr(inner, new, equations, read), type(inner))


def test_the_mesh_that_an_equation_was_traced_under():
    """It can be another, and all else that was set stays."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), jax.threefry_partitionable(False):
        eqn = find(jax.jit(jnp.sin).trace(jnp.ones(4)).jaxpr, "sin")
    assert _compat.traced_under(eqn) == mesh.abstract_mesh
    changed = _compat.as_traced_under(jax.sharding.AbstractMesh((), ()), eqn)
    assert _compat.traced_under(changed).empty
    with changed.ctx.manager:
        assert jax.sharding.get_abstract_mesh().empty and not jax.config.jax_threefry_partitionable


def test_a_jaxpr_with_constants():
    invars, (out,), eqns, _ = _compat.open_jaxpr(jax.make_jaxpr(lambda a, b: a + b)(jnp.ones(3), jnp.ones(3)))
    closed = _compat.close_jaxpr([invars[0]], [out], eqns, {invars[1]: CONSTANT})
    np.testing.assert_array_equal(jex.jaxpr_as_fun(closed)(jnp.ones(3))[0], CONSTANT + 1)


def test_an_equation_has_the_name_stack_that_it_is_given():
    (eqn,) = _compat.open_jaxpr(jax.make_jaxpr(jnp.sin)(1.0))[2]
    moved = _compat.under_scope(eqn, "transpose(jvp())/layer")
    assert str(moved.source_info.name_stack) == "transpose(jvp())/layer"
    assert moved.source_info.traceback is eqn.source_info.traceback
    assert _compat.under_scope(moved, "transpose(jvp())/layer") is moved


def test_an_array_type_of_our_own_is_an_array_to_jax():
    class Doubled(jax.Array):
        """Twice what it is made of."""

        __slots__ = ("half",)
        __hash__ = None
        committed = _committed = False
        shape, dtype = (3,), np.dtype("float32")
        sharding = property(lambda self: self.half.sharding)

        def __init__(self, half):
            self.half = half

    _compat.register_array_type(Doubled, lambda x: jax.typeof(x.half), lambda x: 2 * x.half)
    _compat.forward_array_methods(Doubled, lambda x: 2 * x.half)
    x = Doubled(jnp.arange(3.0))
    assert isinstance(x, jax.Array) and jax.typeof(x).shape == (3,)
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(x), [1, 3, 5])
    np.testing.assert_array_equal(jnp.sin(x), np.sin(np.float32([0, 2, 4])))
    np.testing.assert_array_equal(jax.device_put(x, jax.devices()[1]), [0, 2, 4])
    assert float((x + 1).sum()) == x.sum() + 3 and x.T.shape == (3,)
    assert [float(row) for row in x] == [0, 2, 4]
