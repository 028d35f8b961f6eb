"""Linen modules as tasks, against the plain modules, and the documented table of one."""

import copy
import pickle
import re
import warnings

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.sharding.task_scope import current_task, find_task
from multimesh_compat.jax import unsplit
from multimesh_compat.jax.constraints import with_sharding_constraint
from multimesh_compat.jax.flax.axes import ShardedAxes, shard_axes
from multimesh_compat.jax.flax.modules import module_class, task
from multimesh_compat.jax.parallel import parallelize
from tests.slow import few

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (16, 9))
STAGE = mm.Task("stage", mesh=mm.TaskMesh(devices=[4, 5, 6, 7], axis_sizes=(2, 2), axis_names=("x", "y")))


@pytest.fixture(autouse=True)
def no_warning(monkeypatch):
    monkeypatch.setattr(unsplit, "_warned", True)  # a task that plain JAX traces says so once in a process


def square():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def shapes(variables):
    return jax.tree.map(jnp.shape, nn.unbox(variables))


def assert_equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)


def scopes_of(fun, *args):
    """The name stacks of the equations in a traced function, those of calls inside it included."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield str(eqn.source_info.name_stack)
            for value in eqn.params.values():
                if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
                    yield from walk(getattr(value, "jaxpr", value))

    return list(walk(jax.make_jaxpr(fun)(*args).jaxpr))


class Network(nn.Module):
    """A bit of everything that a module can keep: parameters, statistics, dropout, intermediates."""

    width: int = 4

    @nn.compact
    def __call__(self, x, *, train=False):
        x = nn.Dense(self.width)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(2)(x)


class Coder(nn.Module):
    """Submodules made in setup, and several methods."""

    def setup(self):
        self.narrow = nn.Dense(4)
        self.widen = nn.Dense(9)

    def encode(self, x):
        return self.narrow(x)

    def decode(self, code, *, scale=1.0):
        return scale * self.widen(code)

    def __call__(self, x):
        return self.decode(self.encode(x))


class TestTable:
    DOCUMENTED = """
                                        Task[Dense] Summary
┏━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ path ┃ module      ┃ inputs        ┃ outputs        ┃ params                               ┃
┡━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│      │ Task[Dense] │ float32[16,9] │ float32[16,16] │ mod:                                 │
│      │             │               │                │   params:                            │
│      │             │               │                │     bias: float32[16]                │
│      │             │               │                │     kernel: float32[9,16] P(x, None) │
│      │             │               │                │                                      │
│      │             │               │                │ 160 (640 B)                          │
├──────┼─────────────┼───────────────┼────────────────┼──────────────────────────────────────┤
│      │             │               │          Total │ 160 (640 B)                          │
└──────┴─────────────┴───────────────┴────────────────┴──────────────────────────────────────┘

                                Total Parameters: 160 (640 B)
"""

    def table(self, **console):
        model = task(nn.Dense, mesh=square())(features=16, kernel_init=shard_axes("x", None))
        return model.tabulate(KEY, jnp.ones((16, 9)), console_kwargs=console)

    def test_is_the_documented_one_line_by_line(self):
        # Rich folds columns at 80 where it does not know how wide the terminal is, and writes what is bold or
        # dim as escape codes, unless it is told otherwise.
        printed = self.table(width=120, force_terminal=False, force_jupyter=False)
        # Lines are padded to the width of the table today, and followed by empty ones.
        lines = [line.rstrip() for line in printed.strip("\n").split("\n")]
        documented = self.DOCUMENTED.strip("\n").split("\n")
        while not lines[-1]:
            lines.pop()
        # The title is in the middle of the table today, three columns to the left of the documented one.
        assert len(lines[1]) == 94
        assert lines[0] == "Task[Dense] Summary".center(94).rstrip() == documented[0][3:]
        assert lines[1:] == documented[1:]

    def test_with_the_options_of_flax_only_escape_codes_are_added(self):
        plain = re.sub("\x1b\\[[0-9;]*m", "", self.table(width=120, force_terminal=True, force_jupyter=False))
        assert plain == self.table(width=120, force_terminal=False, force_jupyter=False)

    def test_submodules_have_rows_and_the_task_all_parameters(self):
        table = task(Network, mesh=square())().tabulate(KEY, X, console_kwargs={"width": 150})
        assert re.search(r"Task\[Network\]", table)
        assert re.search(r"Dense_1.*float32\W*\S*\[16,2\]", table)
        parameters = sum(x.size for x in jax.tree.leaves(Network().init(KEY, X)))
        assert f"Total Parameters: {parameters} " in re.sub("\x1b\\[[0-9;]*m", "", table)


class TestVariables:
    def test_parameters_are_under_mod(self):
        variables = task(nn.Dense, mesh=square())(16).init(KEY, X)
        assert shapes(variables) == {"params": {"mod": {"params": {"bias": (16,), "kernel": (9, 16)}}}}

    def test_they_are_those_of_the_plain_module(self):
        wrapped, plain = task(Network, task=STAGE)(), Network()
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)
        assert_equal({name: tree["mod"][name] for name, tree in variables.items()}, expected)
        assert_equal(wrapped.apply(variables, X), plain.apply(expected, X))

    def test_statistics_and_intermediates_are_under_mod_and_updated(self):
        wrapped, plain = task(Network, task=STAGE)(), Network()
        given = {"train": True, "rngs": {"dropout": KEY}, "mutable": ["batch_stats", "intermediates"]}
        y, updates = wrapped.apply(wrapped.init(KEY, X), X, **given)
        expected_y, expected = plain.apply(plain.init(KEY, X), X, **given)
        assert_equal(y, expected_y)
        assert_equal({name: tree["mod"][name] for name, tree in updates.items()}, expected)
        assert set(updates) == {"batch_stats", "intermediates"}

    def test_a_collection_that_is_not_mutable_cannot_be_changed(self):
        wrapped = task(Network, task=STAGE)()
        variables = wrapped.init(KEY, X)
        with pytest.raises(Exception, match='Cannot update variable "mean" in "/BatchNorm_0"'):
            wrapped.apply(variables, X, train=True, rngs={"dropout": KEY})

    def test_a_cache_advances_from_call_to_call(self):
        cls, attention = nn.MultiHeadDotProductAttention, {"num_heads": 2, "decode": True}
        wrapped, plain = task(cls, task=STAGE)(**attention), cls(**attention)
        x = jax.random.normal(KEY, (1, 5, 8))
        variables, expected = wrapped.init(KEY, x), plain.init(KEY, x)
        for position in range(2):
            token = x[:, position : position + 1]
            y, cache = wrapped.apply(variables, token, mutable="cache")
            expected_y, expected_cache = plain.apply(expected, token, mutable="cache")
            variables, expected = {**variables, **cache}, {**expected, **expected_cache}
            assert_equal(y, expected_y)
        assert int(cache["cache"]["mod"]["cache"]["cache_index"]) == 2

    def test_lazy_init_and_capture_of_intermediates(self):
        wrapped = task(nn.Dense, task=STAGE)(3)
        lazy = wrapped.lazy_init(KEY, jax.ShapeDtypeStruct(X.shape, X.dtype))
        assert_equal(lazy, wrapped.init(KEY, X))
        y, captured = wrapped.apply(lazy, X, capture_intermediates=True)
        assert_equal(captured["intermediates"]["mod"]["intermediates"]["__call__"][0], y)

    def test_without_variables_there_are_none(self):
        assert task(nn.Dropout, task=STAGE)(0.5, deterministic=True).init(KEY, X) == {}


class TestKeys:
    class Twice(nn.Module):
        """Two dropouts on the same ones, by two instances or by one that is called twice."""

        dropout: type
        shared: bool

        def setup(self):
            self.first = self.dropout(0.5, deterministic=False)
            self.second = self.first if self.shared else self.dropout(0.5, deterministic=False)

        def __call__(self, x):
            return self.first(x), self.second(x)

    @pytest.mark.parametrize("shared", [True, False])
    def test_dropout_differs_between_keys_instances_and_calls(self, shared):
        wrapped = self.Twice(task(nn.Dropout, task=STAGE), shared)
        ones = jnp.ones(64)
        one, two = (wrapped.apply({}, ones, rngs={"dropout": jax.random.key(n)}) for n in (0, 1))
        assert not np.array_equal(one[0], two[0])
        assert not np.array_equal(one[0], one[1])
        plain = self.Twice(nn.Dropout, shared).apply({}, ones, rngs={"dropout": jax.random.key(0)})
        assert_equal(one, plain)

    def test_init_takes_its_keys_by_name(self):
        class Noisy(nn.Module):
            @nn.compact
            def __call__(self, x):
                noise = self.variable(
                    "state", "noise", lambda: jax.random.normal(self.make_rng("noise"), (3,))
                )
                return x + noise.value

        wrapped = task(Noisy, task=STAGE)()
        one = wrapped.init({"params": KEY, "noise": jax.random.key(1)}, jnp.zeros(3))
        two = wrapped.init({"params": KEY, "noise": jax.random.key(2)}, jnp.zeros(3))
        assert not np.array_equal(wrapped.apply(one, jnp.zeros(3)), wrapped.apply(two, jnp.zeros(3)))
        assert_equal(
            Noisy().init({"params": KEY, "noise": jax.random.key(1)}, 0.0)["state"],
            one["state"]["mod"]["state"],
        )


class TestGradients:
    def test_are_those_of_the_plain_module_and_belong_to_the_task(self):
        wrapped, plain = task(Network, task=STAGE)(), Network()
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)

        def loss(module):
            return lambda variables: jnp.sum(module.apply(variables, X) ** 2)

        assert_equal(
            jax.grad(loss(wrapped))(variables)["params"]["mod"]["params"],
            jax.grad(loss(plain))(expected)["params"],
        )
        backward = [s for s in scopes_of(jax.grad(loss(wrapped)), variables) if "transpose(" in s]
        inside = [s for s in backward if find_task(s) == STAGE]
        assert len(inside) > 5
        # What is left outside is the derivative of the loss itself.
        assert all("Dense" not in s and "BatchNorm" not in s for s in set(backward) - set(inside))


class TestScope:
    @pytest.mark.parametrize("cls", [Network, Coder])
    def test_init_and_apply_compute_in_the_task(self, cls):
        wrapped = task(cls, task=STAGE)()
        variables = wrapped.init(KEY, X)
        for fun, args in ((wrapped.init, (KEY, X)), (wrapped.apply, (variables, X))):
            found = scopes_of(fun, *args)
            assert sum(find_task(s) == STAGE for s in found) > 3
            assert {find_task(s) for s in found if "Dense" in s or "narrow" in s} == {STAGE}

    def test_parameters_made_in_setup_are_made_in_the_task(self):
        seen = []

        class Made(nn.Module):
            def setup(self):
                seen.append(current_task())
                self.scale = self.param("scale", lambda key: jnp.ones(3))

            def __call__(self, x):
                return x * self.scale

        wrapped = task(Made, task=STAGE)()
        wrapped.apply(wrapped.init(KEY, jnp.ones(3)), jnp.ones(3))
        assert seen and set(seen) == {STAGE}

    def test_mm_jit_runs_it_on_the_mesh_of_the_task(self):
        class Two(nn.Module):
            @nn.compact
            def __call__(self, x):
                for n in range(2):
                    devices = jax.devices()[4 * n : 4 * n + 4]
                    x = nn.relu(task(nn.Dense, f"stage{n}", devices=devices)(5)(x))
                return x

        variables = Two().init(KEY, X)
        apply = mm.jit(lambda variables, x: Two().apply(variables, x))
        ran = [[d.id for d in call.mesh.devices.flat] for call in apply.program(variables, X).calls]
        assert ran == [[0, 1, 2, 3], [4, 5, 6, 7]]
        y = apply(variables, X)
        assert {d.id for d in y.devices()} == {4, 5, 6, 7}
        assert_equal(np.asarray(y), np.asarray(Two().apply(variables, X)))

    def test_traced_by_jax_alone_it_runs_unsplit_and_warns_once(self, monkeypatch):
        monkeypatch.setattr(unsplit, "_warned", False)
        wrapped = task(nn.Dense, "dense", task=STAGE)(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            variables = wrapped.init(KEY, X)
            jax.eval_shape(wrapped.init, KEY, X)
            wrapped.tabulate(KEY, X)
            y = wrapped.apply(variables, X)
        with pytest.warns(UserWarning, match="task 'dense' is traced outside mm.jit"):
            assert_equal(jax.jit(wrapped.apply)(variables, X), y)


class TestModules:
    def test_fields_name_and_repr_are_those_of_a_module(self):
        wrapped = task(Network, task=STAGE)(width=3, name="net")
        assert (wrapped.width, wrapped.name) == (3, "net")
        assert repr(wrapped) == "Task[Network](\n    # attributes\n    width = 3\n)"
        assert isinstance(wrapped, Network)
        assert type(wrapped).__name__ == type(wrapped).__qualname__ == "Task[Network]"
        assert type(wrapped).__doc__ == Network.__doc__
        assert wrapped == task(Network, task=STAGE)(width=3, name="net") != task(Network, task=STAGE)()
        assert wrapped.clone(width=5).width == 5

    def test_equal_tasks_of_one_class_are_one_class(self):
        def mesh():
            return mm.TaskMesh(devices=[0, 1], axis_names=("x",))

        assert task(nn.Dense, mesh=mesh()) is task(nn.Dense, mesh=mesh())
        assert task(nn.Dense, mesh=mesh()) is module_class(nn.Dense, mm.Task("Dense", mesh=mesh()))
        assert task(nn.Dense, "other", mesh=mesh()) is not task(nn.Dense, mesh=mesh())

    def test_pickled_and_copied(self):
        wrapped = task(Network, task=STAGE)(width=3)
        again = pickle.loads(pickle.dumps(wrapped))
        assert again == wrapped == copy.deepcopy(wrapped)
        assert type(again) is type(wrapped)
        assert_equal(again.init(KEY, X), wrapped.init(KEY, X))

    def test_names_of_submodules(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = task(nn.Dense, task=STAGE)
                x = dense(4)(x)
                x = dense(3, name="named")(x)
                return dense(2)(x)

        assert shapes(Model().init(KEY, X))["params"] == {
            "Task[Dense]_0": {"mod": {"params": {"bias": (4,), "kernel": (9, 4)}}},
            "named": {"mod": {"params": {"bias": (3,), "kernel": (4, 3)}}},
            "Task[Dense]_1": {"mod": {"params": {"bias": (2,), "kernel": (3, 2)}}},
        }

    def test_other_methods(self):
        class Model(nn.Module):
            coder: type

            def setup(self):
                self.inner = self.coder()

            def __call__(self, x):
                return self.inner.decode(self.inner.encode(x), scale=2.0)

        wrapped, plain = Model(task(Coder, task=STAGE)), Model(Coder)
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)
        assert set(variables["params"]["inner"]["mod"]["params"]) == {"narrow", "widen"}
        assert_equal(wrapped.apply(variables, X), plain.apply(expected, X))
        kernels = [s for s in scopes_of(wrapped.apply, variables, X) if "narrow" in s or "widen" in s]
        assert {find_task(s) for s in kernels} == {STAGE}

    def test_methods_by_name_as_functions_and_bound(self):
        cls = task(Coder, task=STAGE)
        variables = cls().init(KEY, X)
        code = Coder().apply(variables["params"]["mod"], X, method="encode")
        assert_equal(cls().apply(variables, X, method="encode"), code)
        assert_equal(cls().apply(variables, X, method=cls.encode), code)
        assert_equal(cls().bind(variables).encode(X), code)
        assert_equal(
            cls().init(KEY, X, method="encode")["params"]["mod"]["params"],
            {"narrow": variables["params"]["mod"]["params"]["narrow"]},
        )

    def test_attributes_of_setup_are_inside_the_task_alone(self):
        cls = task(Coder, task=STAGE)
        with pytest.raises(AttributeError, match='"Task.Coder." object has no attribute "narrow"'):
            _ = cls().bind(cls().init(KEY, X)).narrow

    def test_unbound_call_says_what_flax_says(self):
        with pytest.raises(Exception, match="Can't call compact methods on unbound modules"):
            task(nn.Dense, task=STAGE)(3)(X)

    def test_functions_as_defaults_of_fields_stay_fields(self):
        class Activated(nn.Module):
            activation: object = nn.relu

            def helper(self, x):
                return self.activation(x)

            def __call__(self, x):
                return self.helper(x)

        wrapped = task(Activated, task=STAGE)
        assert_equal(wrapped().apply({}, X), nn.relu(X))
        assert_equal(wrapped(nn.tanh).apply({}, X), nn.tanh(X))

    def test_modules_as_fields_are_part_of_the_task(self):
        wrapped = task(nn.Sequential, task=STAGE)([nn.Dense(4), nn.relu, nn.Dense(2)])
        variables = wrapped.init(KEY, X)
        assert set(variables["params"]["mod"]["params"]) == {"layers_0", "layers_2"}
        plain = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
        assert_equal(wrapped.apply(variables, X), plain.apply(plain.init(KEY, X), X))

    def test_a_module_of_another_is_shared(self):
        class Head(nn.Module):
            embed: nn.Module

            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(self.embed.attend(x))

        class Model(nn.Module):
            head: type

            def setup(self):
                self.embed = nn.Embed(7, 5)
                self.logits = self.head(embed=self.embed)

            def __call__(self, tokens):
                return self.logits(self.embed(tokens))

        tokens = jnp.arange(4)
        wrapped, plain = Model(task(Head, task=STAGE)), Model(Head)
        variables, expected = wrapped.init(KEY, tokens), plain.init(KEY, tokens)
        assert shapes(variables["params"]) == {
            "embed": {"embedding": (7, 5)},
            "logits": {"mod": {"params": {"Dense_0": {"bias": (3,), "kernel": (7, 3)}}}},
        }
        assert_equal(wrapped.apply(variables, tokens), plain.apply(expected, tokens))

    def test_tasks_in_tasks(self):
        inner = task(nn.Dense, "inner", task=STAGE)

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(2)(inner(3)(x))

        wrapped = task(Outer, "outer", mesh=square())()
        variables = wrapped.init(KEY, X)
        assert set(variables["params"]["mod"]["params"]) == {"Dense_0", "Task[Dense]_0"}
        names = {t.name for s in scopes_of(wrapped.apply, variables, X) if (t := find_task(s)) is not None}
        assert names == {"inner", "outer"}

    @few(1)
    @pytest.mark.parametrize("transform", [nn.remat, nn.jit])
    def test_lifted_transforms_around_it(self, transform):
        cls = task(nn.Sequential, task=STAGE)
        wrapped, changed = (c([nn.Dense(4), nn.Dense(2)]) for c in (cls, transform(cls)))
        variables = wrapped.init(KEY, X)
        plain = transform(nn.Sequential)([nn.Dense(4), nn.Dense(2)])
        assert_equal(changed.init(KEY, X)["params"]["mod"], plain.init(KEY, X))
        assert_equal(
            *(jax.grad(lambda v, m=m: jnp.sum(m.apply(v, X) ** 2))(variables) for m in (wrapped, changed))
        )

    def test_remat_of_tasks_in_mm_jit(self):
        class Two(nn.Module):
            dense: object

            @nn.compact
            def __call__(self, x):
                for n in range(2):
                    x = nn.tanh(self.dense(n)(5, name=f"layer{n}")(x))
                return jnp.sum(x**2)

        def dense(n):
            return nn.remat(task(nn.Dense, f"stage{n}", devices=jax.devices()[4 * n : 4 * n + 4]))

        wrapped, plain = Two(dense), Two(lambda n: nn.Dense)
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)
        grad = mm.jit(jax.grad(lambda v: wrapped.apply(v, X)))
        assert {len(call.mesh.devices.flat) for call in grad.program(variables).calls} == {4}
        grads = jax.tree.map(np.asarray, grad(variables))["params"]
        grads_expected = jax.grad(lambda v: plain.apply(v, X))(expected)["params"]
        assert_equal({name: found["mod"]["params"] for name, found in grads.items()}, grads_expected)

    def test_scan_and_vmap_around_it(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(9, kernel_init=shard_axes("x", None))(x), None

        def repeated(layer):
            return nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )()

        wrapped, plain = repeated(task(Layer, task=STAGE)), repeated(Layer)
        variables, expected = wrapped.init(KEY, X, None), plain.init(KEY, X, None)
        kernel = variables["params"]["mod"]["params"]["Dense_0"]["kernel"]
        assert (kernel.value.shape, kernel.names) == ((3, 9, 9), ("layers", "x", None))
        assert_equal(wrapped.apply(variables, X, None)[0], plain.apply(expected, X, None)[0])
        mapped = nn.vmap(task(nn.Dense, task=STAGE), variable_axes={"params": 0}, split_rngs={"params": True})
        assert shapes(mapped(2).init(KEY, X))["params"]["mod"]["params"]["kernel"] == (16, 9, 2)


class Two(nn.Module):
    a: nn.Module
    b: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.b(nn.tanh(self.a(x)))


class Around(nn.Module):
    inner: nn.Module

    def __call__(self, x):
        return nn.tanh(self.inner(x))


class TestFields:
    """Modules that are given as fields, which are part of the task."""

    def same_under_mod(self, wrapped, plain):
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)
        assert set(variables) == set(expected)
        for name, tree in variables.items():
            assert shapes(tree) == {"mod": {name: shapes(expected[name])}}
        assert_equal(wrapped.apply(variables, X), plain.apply(expected, X))
        return variables

    def test_one_module_in_two_fields_has_one_set_of_parameters(self):
        def tied(cls):
            layer = nn.Dense(9)
            return cls(layer, layer)

        variables = self.same_under_mod(tied(task(Two, task=STAGE)), tied(Two))
        assert len(jax.tree.leaves(variables)) == 2

    def test_one_module_in_a_field_and_inside_of_another(self):
        def tied(cls):
            layer = nn.Dense(9)
            return cls(layer, Around(layer))

        variables = self.same_under_mod(tied(task(Two, task=STAGE)), tied(Two))
        assert len(jax.tree.leaves(variables)) == 2

    @pytest.mark.parametrize(
        "fields",
        [
            lambda: (Around(Around(nn.Dense(3))), nn.Dense(4)),
            lambda: (nn.Sequential([nn.Sequential([nn.Dense(3)]), jnp.tanh]), Around(nn.Dense(4))),
            lambda: (Around(nn.BatchNorm(use_running_average=True)), nn.Dense(4)),
        ],
    )
    def test_modules_inside_of_fields(self, fields):
        self.same_under_mod(task(Two, task=STAGE)(*fields()), Two(*fields()))


class TestSubclasses:
    """Subclasses of the class that `task` returns are like subclasses of the module class."""

    def subclass(self, base):
        class Scaled(base):
            by: float = 2.0

            def setup(self):
                super().setup()
                self.more = nn.Dense(9)

            def hidden(self, x):
                scopes.append(getattr(current_task(), "name", None))
                return self.by * super().hidden(self.more(x))

        scopes = []
        return Scaled, scopes

    class Base(nn.Module):
        def setup(self):
            self.layer = nn.Dense(9)

        def hidden(self, x):
            return nn.tanh(x)

        def __call__(self, x):
            return self.layer(self.hidden(x))

    @pytest.mark.parametrize("lift", [lambda cls: cls, nn.remat, nn.jit])
    def test_what_it_overrides_adds_and_calls(self, lift):
        (wrapped, scopes), (plain, _) = self.subclass(task(self.Base, task=STAGE)), self.subclass(self.Base)
        wrapped, plain = lift(wrapped)(by=3.0), lift(plain)(by=3.0)
        variables, expected = wrapped.init(KEY, X), plain.init(KEY, X)
        assert shapes(variables) == {"params": {"mod": {"params": shapes(expected["params"])}}}
        assert_equal(wrapped.apply(variables, X), plain.apply(expected, X))
        assert set(scopes) == {"stage"}
        hidden = wrapped.apply(variables, X, method="hidden")
        assert_equal(hidden, plain.apply(expected, X, method="hidden"))

    def test_copied(self):
        scaled = self.subclass(task(self.Base, task=STAGE))[0](by=3.0)
        assert copy.deepcopy(scaled) == scaled and type(copy.deepcopy(scaled)) is type(scaled)


class TestArguments:
    def test_the_name_is_that_of_the_class_unless_given(self):
        names = {}

        class Seen(nn.Module):
            key: str

            def __call__(self):
                names[self.key] = current_task().name

        task(Seen, mesh=square())("default").apply({})
        task(Seen, "given", mesh=square())("positional").apply({})
        task(Seen, name="given", task=STAGE)("renamed").apply({})
        task(Seen, task=STAGE)("task").apply({})
        assert names == {"default": "Seen", "positional": "given", "renamed": "given", "task": "stage"}

    def test_only_module_classes(self):
        for given in (nn.Dense(3), lambda x: x, "Dense", dict):
            with pytest.raises(TypeError, match="flax.task takes a linen Module class"):
                task(given, task=STAGE)

    def test_errors_are_those_of_task(self):
        with pytest.raises(ValueError, match="logical_axes"):
            task(nn.Dense, devices=jax.devices(), logical_axes=[("mlp", "x")])
        with pytest.raises(ValueError, match="device_axes"):
            task(nn.Dense, devices=jax.devices(), device_axes=("x", "y"))
        with pytest.raises(ValueError, match="mesh"):
            task(nn.Dense, mesh=square(), devices=jax.devices())
        with pytest.raises(TypeError, match="task="):
            task(nn.Dense, task=STAGE, mesh=square())


class TestShardAxes:
    def test_values_are_those_of_the_initialiser(self):
        box = shard_axes("x", None)(KEY, (9, 16), jnp.float32)
        assert isinstance(box, ShardedAxes) and isinstance(box, nn.Partitioned)
        assert box.names == ("x", None)
        assert_equal(box.value, nn.initializers.lecun_normal()(KEY, (9, 16), jnp.float32))
        assert nn.get_partition_spec(box) == P("x", None)
        ones = shard_axes("x", init=nn.initializers.ones_init())(KEY, (4,))
        assert_equal(ones.value, jnp.ones(4))

    def test_other_number_of_axes(self):
        with pytest.raises(ValueError, match=r"names 1 axes, and the parameter has 2 dimensions, \(9, 3\)"):
            nn.Dense(3, kernel_init=shard_axes("x")).init(KEY, X)

    def test_what_is_no_name(self):
        for axis in (0, ["x"], ("x", 1)):
            with pytest.raises(TypeError, match="shard_axes takes a name, a tuple of names or None"):
                shard_axes(axis)

    def derived(self, *axes, **options):
        """How the kernel of a task would best be sharded, which is as its axes say."""
        model = task(nn.Dense, **options)(16, kernel_init=shard_axes(*axes))
        variables = model.init(KEY, jnp.ones((2, 8)))
        (found,), _ = mm.jit(lambda v: model.apply(v, jnp.ones((2, 8)))).input_shardings(variables)
        kernel = found["params"]["mod"]["params"]["kernel"].value
        return kernel.mesh.axis_names, tuple(kernel.spec) + (None,) * (2 - len(kernel.spec))

    def test_names_are_axes_of_the_mesh_of_the_task(self):
        assert self.derived("x", None, mesh=square()) == (("x", "y"), ("x", None))
        assert self.derived(None, ("x", "y"), mesh=square()) == (("x", "y"), (None, ("x", "y")))
        assert self.derived("z", "y", mesh=square()) == (("x", "y"), (None, "y"))

    def test_names_are_translated_by_the_task(self):
        rules = [("embed", None), ("mlp", "y")]
        assert self.derived("embed", "mlp", mesh=square(), logical_axes=rules) == (("x", "y"), (None, "y"))

    def test_without_device_axes_they_are_replication(self):
        devices = np.array(jax.devices()[:4]).reshape(2, 2)
        assert self.derived("x", "y", devices=devices)[1] == (None, None)

    def test_outside_tasks_they_are_axes_of_the_multimesh_and_else_nothing(self):
        x = X[:, :8]
        model = nn.Dense(16, kernel_init=shard_axes("model", "nowhere"))
        variables = model.init(KEY, x)
        plain = nn.Dense(16)
        assert_equal(model.apply(variables, x), plain.apply(plain.init(KEY, x), x))
        with mm.MultiMesh(axis_sizes=(4, 2), axis_names=("data", "model")):
            _, init = parallelize(model.apply, lambda: model.init(KEY, x), initial_batch=x)
            params = nn.unbox(init()["params"])
        kernel = params["kernel"]
        assert (len(kernel.devices()), kernel.sharding.spec, params["bias"].sharding.spec) == (
            8,
            P("model"),
            P(),
        )

    def test_box_without_its_constraint(self):
        box = ShardedAxes(jnp.ones(4), names=("x",))
        assert box.unbox(apply_constraint=False) is box.value

    def test_with_sharding_constraint_of_the_package_is_that_of_multimesh_jax(self):
        import multimesh_compat.jax

        assert multimesh_compat.jax.with_sharding_constraint is with_sharding_constraint
