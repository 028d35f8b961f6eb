"""Linen models trained by `parallelize_step`: where their state is, and that they train as on one device."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import unsplit
from multimesh_compat.jax.constraints import with_sharding_constraint
from multimesh_compat.jax.flax.axes import shard_axes
from multimesh_compat.jax.flax.modules import task
from multimesh_compat.jax.flax.step import parallelize_step
from tests.slow import few

KEY = jax.random.key(42)
BATCH = (
    np.asarray(jax.random.normal(jax.random.key(1), (16, 8))),
    np.asarray(jax.random.normal(jax.random.key(2), (16, 4))),
)
WIDTHS = (16, 4)


def make_mesh():
    return mm.MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "batch", "model"))


def register_layers():
    mm.register_task(
        r"layer\d+", callback=lambda name, backprop: mm.Task(name, mesh_slice={"stage": int(name[5:])})
    )


class Pipeline(nn.Module):
    """Two dense layers and a loss. What the layers are made by says whether they are tasks."""

    dense: object = lambda n: nn.Dense
    kernel_init: object = shard_axes("batch", "model")

    @nn.compact
    def __call__(self, batch):
        x, target = batch
        for n, width in enumerate(WIDTHS):
            x = self.dense(n)(width, kernel_init=self.kernel_init, name=f"layer{n}")(x)
            x = nn.relu(x) if n == 0 else x
        return jnp.mean((x - target) ** 2)


def explicit(**options):
    return lambda n: task(nn.Dense, f"stage{n}", mesh_slice={"stage": n}, **options)


def layer(params, n):
    """The parameters of one layer, a task or not."""
    found = params[f"layer{n}"]
    return found["mod"]["params"] if "mod" in found else found


def where(x):
    return {d.id for d in x.devices()}, x.sharding.spec


def one_device(model, optimizer, batches, key=KEY):
    """The losses and the last parameters of plain JAX."""
    params = nn.unbox(model.init(key, batches[0])["params"])
    slots = optimizer.init(params)
    losses, grad_fn = [], jax.jit(jax.value_and_grad(lambda p, b: model.apply({"params": p}, b)))
    for batch in batches:
        loss, grads = grad_fn(params, batch)
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


def train(step, state, batches):
    losses = []
    for batch in batches:
        loss, state = step(state, batch)
        losses.append(float(loss))
    return losses, state


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6),
        found,
        expected,
    )


@pytest.fixture(params=["explicit", "registered"])
def pipeline(request):
    if request.param == "registered":
        register_layers()
        return Pipeline()
    return Pipeline(explicit())


class TestDocumentedFlow:
    def test_state_is_on_the_submesh_of_its_task(self, pipeline):
        _, state, _ = parallelize_step(pipeline, optax.sgd(0.1), make_mesh(), BATCH)
        for n, devices in enumerate(({0, 1, 2, 3}, {4, 5, 6, 7})):
            assert where(layer(state.params, n)["bias"]) == (devices, P())
            assert where(layer(state.params, n)["kernel"]) == (devices, P("batch", "model"))
        kernel = layer(state.params, 1)["kernel"]
        assert kernel.shape == (16, 4)
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 2)}
        assert where(state.step) == (set(range(8)), P())

    @few(1)
    def test_losses_and_parameters_are_those_of_one_device(self, pipeline):
        step, state, _ = parallelize_step(pipeline, optax.sgd(0.1), make_mesh(), BATCH)
        found, after = train(step, state, [BATCH] * 4)
        mm.clear_tasks()
        expected, params = one_device(Pipeline(), optax.sgd(0.1), [BATCH] * 4)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert found[-1] < 0.9 * found[0]
        assert_close([layer(after.params, n) for n in range(2)], [layer(params, n) for n in range(2)])
        assert int(after.step) == 4

    @few(1)
    def test_the_state_stays_where_it_is(self, pipeline):
        step, state, _ = parallelize_step(pipeline, optax.adam(0.1), make_mesh(), BATCH)
        _, after = step(state, BATCH)
        assert jax.tree.map(where, after) == jax.tree.map(where, state)

    def test_the_step_is_split_between_the_stages(self, pipeline):
        step, state, _ = parallelize_step(pipeline, optax.sgd(0.1), make_mesh(), BATCH)
        calls = step.program(state, BATCH).calls
        phases = [(tuple(d.id for d in c.mesh.devices.flat), c.fragment.phase) for c in calls][:4]
        first, second = (0, 1, 2, 3), (4, 5, 6, 7)
        assert phases == [(first, "forward"), (second, "forward"), (second, "backward"), (first, "backward")]

    @few(1)
    def test_slots_of_adam_are_where_their_parameter_is(self, pipeline):
        step, state, _ = parallelize_step(pipeline, optax.adam(0.01), make_mesh(), BATCH)
        adam = state.opt_state[0]
        assert jax.tree.map(where, adam.mu) == jax.tree.map(where, state.params)
        assert jax.tree.map(where, adam.nu) == jax.tree.map(where, state.params)
        assert where(adam.count) == (set(range(8)), P())
        found, after = train(step, state, [BATCH] * 3)
        mm.clear_tasks()
        np.testing.assert_allclose(found, one_device(Pipeline(), optax.adam(0.01), [BATCH] * 3)[0], rtol=1e-5)
        assert int(after.opt_state[0].count) == 3


class TestAxes:
    def test_with_partitioning_is_translated_by_the_task_too(self):
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        model = Pipeline(explicit(logical_axes=[("mlp", "model")]), kernel_init)
        step, state, _ = parallelize_step(model, optax.sgd(0.1), make_mesh(), BATCH)
        assert where(layer(state.params, 1)["kernel"]) == ({4, 5, 6, 7}, P(None, "model"))
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH] * 2)
        np.testing.assert_allclose(train(step, state, [BATCH] * 2)[0], expected, rtol=1e-5)

    def test_without_names_parameters_are_replicated_in_their_task(self):
        model = Pipeline(explicit(), nn.initializers.lecun_normal())
        _, state, _ = parallelize_step(model, optax.sgd(0.1), make_mesh(), BATCH)
        assert where(layer(state.params, 1)["kernel"]) == ({4, 5, 6, 7}, P())

    @pytest.mark.slow
    def test_a_slot_of_another_shape_is_sharded_as_what_is_left_of_its_parameter(self):
        optimizer = optax.adafactor(0.01, min_dim_size_to_factor=4)
        step, state, _ = parallelize_step(Pipeline(explicit()), optimizer, make_mesh(), BATCH)
        factored = state.opt_state[0]
        rows, columns = (layer(x, 1)["kernel"] for x in (factored.v_row, factored.v_col))
        assert (rows.shape, where(rows)) == ((4,), ({4, 5, 6, 7}, P("model")))
        assert (columns.shape, where(columns)) == ((16,), ({4, 5, 6, 7}, P("batch")))
        found, _ = train(step, state, [BATCH] * 2)
        np.testing.assert_allclose(found, one_device(Pipeline(), optimizer, [BATCH] * 2)[0], rtol=1e-5)

    @few(1)
    @pytest.mark.parametrize("kind", ["adamw", "multi_transform"])
    def test_what_an_optimizer_masks_has_no_slots(self, kind):
        def is_kernel(params):
            return jax.tree.map(lambda x: x.ndim > 1, params)

        def labels(params):
            return jax.tree.map(lambda x: "kernel" if x.ndim > 1 else "bias", params)

        optimizer = {
            "adamw": optax.adamw(0.1, mask=is_kernel),
            "multi_transform": optax.multi_transform(
                {"kernel": optax.adam(0.1), "bias": optax.sgd(1.0)}, labels
            ),
        }[kind]
        step, state, _ = parallelize_step(Pipeline(explicit()), optimizer, make_mesh(), BATCH)
        found, _ = train(step, state, [BATCH] * 3)
        np.testing.assert_allclose(found, one_device(Pipeline(), optimizer, [BATCH] * 3)[0], rtol=1e-5)

    @pytest.mark.slow
    def test_layers_in_a_scan(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.relu(nn.Dense(8, kernel_init=shard_axes(None, "model"))(x)), None

        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                scan = nn.scan(
                    Layer,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                    metadata_params={nn.PARTITION_NAME: None},
                )
                return scan(name="layers")(x, None)

        class Deep(nn.Module):
            stack: object

            @nn.compact
            def __call__(self, batch):
                x, _ = self.stack(batch[0], None)
                return jnp.mean((nn.Dense(4, name="layer1")(x) - batch[1]) ** 2)

        register_layers()
        wrapped = task(Stack, mesh_slice={"stage": 0})(name="stack")
        step, state, _ = parallelize_step(Deep(wrapped), optax.sgd(0.1), make_mesh(), BATCH)
        dense = state.params["stack"]["mod"]["params"]["layers"]["Dense_0"]
        assert where(dense["kernel"]) == ({0, 1, 2, 3}, P(None, None, "model"))
        assert where(dense["bias"]) == ({0, 1, 2, 3}, P())
        found, _ = train(step, state, [BATCH] * 2)
        expected, _ = one_device(Deep(Stack(name="stack")), optax.sgd(0.1), [BATCH] * 2)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class TestBatches:
    @few(1)
    @pytest.mark.parametrize(
        "sharding, replicate",
        [
            (lambda mesh: jax.devices()[3], True),
            (lambda mesh: NamedSharding(mesh.mesh, P(("stage", "batch", "model"))), True),
            (lambda mesh: NamedSharding(mesh.slice(stage=1), P("model")), False),
        ],
        ids=["one device", "over all", "the last stage"],
    )
    def test_of_any_sharding_are_accepted(self, sharding, replicate):
        mesh = make_mesh()
        step, state, _ = parallelize_step(
            Pipeline(explicit()), optax.sgd(0.1), mesh, BATCH, replicate_inputs=replicate
        )
        batches = [jax.device_put(BATCH, sharding(mesh)), BATCH]
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH, BATCH])
        np.testing.assert_allclose(train(step, state, batches)[0], expected, rtol=1e-5)

    def test_local_batch_gives_a_function_that_prepares_batches_on_all_devices(self):
        step, state, _, prepare = parallelize_step(
            Pipeline(explicit()), optax.sgd(0.1), make_mesh(), local_batch=BATCH
        )
        prepared = prepare(BATCH)
        assert jax.tree.map(where, prepared) == ((set(range(8)), P()),) * 2
        assert_close(prepared, BATCH)
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH])
        np.testing.assert_allclose(train(step, state, [prepared])[0], expected, rtol=1e-5)

    def test_replicate_inputs_false_shards_them_as_the_constraints_imply(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, batch):
                with jax.named_scope("layer0"):
                    x = with_sharding_constraint(batch["x"], P("batch"))
                x = nn.Dense(16, name="layer0")(x)
                x = nn.Dense(4, name="layer1")(x)
                with jax.named_scope("layer1"):
                    return jnp.mean((x - with_sharding_constraint(batch["target"], P("model"))) ** 2)

        register_layers()

        batch = dict(zip(("x", "target"), BATCH))
        step, state, _, prepare = parallelize_step(
            Model(), optax.sgd(0.1), make_mesh(), local_batch=batch, replicate_inputs=False
        )
        prepared = prepare(batch)
        assert where(prepared["x"]) == ({0, 1, 2, 3}, P("batch"))
        assert where(prepared["target"]) == ({4, 5, 6, 7}, P("model"))
        assert_close(train(step, state, [prepared] * 2)[0], train(step, state, [batch] * 2)[0])

    def test_other_sizes_later(self):
        step, state, _ = parallelize_step(Pipeline(explicit()), optax.sgd(0.1), make_mesh(), BATCH)
        smaller = jax.tree.map(lambda x: x[:4], BATCH)
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH, smaller])
        np.testing.assert_allclose(train(step, state, [BATCH, smaller])[0], expected, rtol=1e-5)


class TestState:
    def test_is_a_train_state_of_plain_arrays(self):
        model = Pipeline(explicit())
        _, state, _ = parallelize_step(model, optax.sgd(0.1, momentum=0.9), make_mesh(), BATCH)
        assert isinstance(state, TrainState)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        boxed = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nn.Partitioned))
        assert not any(isinstance(x, nn.Partitioned) for x in boxed)
        assert (int(state.step), state.collections) == (0, {})
        value = state.apply_fn({"params": jax.device_get(state.params)}, BATCH)
        np.testing.assert_allclose(value, one_device(Pipeline(), optax.sgd(0.1), [BATCH])[0][0], rtol=1e-5)

    def test_rng_is_the_key_of_init(self):
        states = {
            key: parallelize_step(Pipeline(explicit()), optax.sgd(0.1), make_mesh(), BATCH, **options)[1]
            for key, options in {"default": {}, 0: {"rng": KEY}, 1: {"rng": jax.random.key(1)}}.items()
        }
        kernels = {key: np.asarray(layer(state.params, 0)["kernel"]) for key, state in states.items()}
        assert_close(kernels["default"], kernels[0])
        assert not np.allclose(kernels[0], kernels[1])
        assert_close(
            kernels[1], nn.unbox(Pipeline().init(jax.random.key(1), BATCH))["params"]["layer0"]["kernel"]
        )

    def test_keys_by_name_give_each_step_one_of_its_own(self):
        class Dropped(nn.Module):
            @nn.compact
            def __call__(self, batch):
                x = nn.Dense(16, name="layer0")(batch[0])
                x = nn.Dropout(0.5, deterministic=False)(x)
                return jnp.mean((nn.Dense(4, name="layer1")(x) - batch[1]) ** 2)

        register_layers()
        keys = {"params": KEY, "dropout": jax.random.key(5)}
        step, state, _ = parallelize_step(Dropped(), optax.sgd(0.0), make_mesh(), BATCH, rng=keys)
        found, _ = train(step, state, [BATCH] * 3)
        params = Dropped().init(keys, BATCH)
        expected = [
            float(Dropped().apply(params, BATCH, rngs={"dropout": jax.random.fold_in(keys["dropout"], n)}))
            for n in range(3)
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert len({round(loss, 4) for loss in found}) == 3

    def test_batch_statistics_are_carried(self):
        class Normed(nn.Module):
            @nn.compact
            def __call__(self, batch):
                x = nn.BatchNorm(use_running_average=False, momentum=0.5, name="norm")(batch[0])
                return jnp.mean((nn.Dense(4, name="layer1")(x) - batch[1]) ** 2)

        mm.register_task("norm", task=mm.Task("norm", mesh_slice={"stage": 0}))
        register_layers()
        step, state, _ = parallelize_step(Normed(), optax.sgd(0.1), make_mesh(), BATCH)
        mean = state.collections["batch_stats"]["norm"]["mean"]
        assert where(mean) == where(state.params["norm"]["scale"]) == ({0, 1, 2, 3}, P())
        _, after = train(step, state, [BATCH] * 2)
        found = after.collections["batch_stats"]["norm"]["mean"]
        np.testing.assert_allclose(found, 0.75 * BATCH[0].mean(axis=0), rtol=1e-5, atol=1e-6)
        assert where(found) == where(mean)

    def test_models_see_their_variables_as_they_are(self):
        """By name, and as what another module takes apart."""

        class Reads(nn.Module):
            @nn.compact
            def __call__(self, batch):
                x = batch[0]
                self.variable("seen", "mean", jnp.zeros, 8)
                self.put_variable("seen", "mean", self.get_variable("seen", "mean") + x.mean(0))
                x = nn.Dense(8, name="plain")(explicit()(0)(8)(x))
                weights = self.variables["params"]["plain"]["kernel"]
                return jnp.mean(nn.WeightNorm(nn.Dense(4))(x) ** 2) + 0.1 * jnp.sum(weights**2)

        step, state, _ = parallelize_step(Reads(), optax.sgd(0.1), make_mesh(), BATCH)
        variables = Reads().init(KEY, BATCH)
        assert jax.tree.structure(state.params) == jax.tree.structure(variables["params"])
        for _ in range(3):
            before = jax.device_get({"params": state.params, **state.collections})
            value, updates = Reads().apply(before, BATCH, mutable=["seen"])
            loss, state = step(state, BATCH)
            np.testing.assert_allclose(loss, value, rtol=1e-5)
            assert_close(state.collections, updates)

    def test_the_old_state_is_still_there(self):
        step, state, _ = parallelize_step(Pipeline(explicit()), optax.sgd(0.1), make_mesh(), BATCH)
        (one, _), (two, _) = (train(step, state, [BATCH]) for _ in range(2))
        assert one == two

    def test_it_is_never_whole_on_one_device(self, monkeypatch):
        moved = []
        put = jax.device_put
        monkeypatch.setattr(jax, "device_put", lambda x, *args, **kw: moved.append(x) or put(x, *args, **kw))
        batch = jax.tree.map(lambda x: x[:12], BATCH)  # of no shape that a parameter has
        parallelize_step(Pipeline(explicit()), optax.adam(0.1), make_mesh(), batch)
        assert {np.shape(x) for x in jax.tree.leaves(moved)} <= {(12, 8), (12, 4), ()}


class TestMeshes:
    def test_a_jax_mesh_does_as_well(self):
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "batch", "model"))
        step, state, returned = parallelize_step(Pipeline(explicit()), optax.sgd(0.1), mesh, BATCH)
        assert returned is mesh
        assert where(layer(state.params, 1)["kernel"]) == ({4, 5, 6, 7}, P("batch", "model"))
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH])
        np.testing.assert_allclose(train(step, state, [BATCH])[0], expected, rtol=1e-5)

    def test_the_mesh_is_returned_as_given(self):
        mesh = make_mesh()
        assert parallelize_step(Pipeline(explicit()), optax.sgd(0.1), mesh, BATCH)[2] is mesh

    def test_tasks_of_devices(self):
        def dense(n):
            return task(
                nn.Dense,
                f"stage{n}",
                devices=np.arange(4 * n, 4 * n + 4).reshape(2, 2),
                device_axes=("batch", "model"),
            )

        step, state, _ = parallelize_step(Pipeline(dense), optax.sgd(0.1), make_mesh(), BATCH)
        assert where(layer(state.params, 1)["kernel"]) == ({4, 5, 6, 7}, P("batch", "model"))
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH])
        np.testing.assert_allclose(train(step, state, [BATCH])[0], expected, rtol=1e-5)

    def test_without_tasks_it_is_one_program_over_the_whole_mesh(self):
        step, state, _ = parallelize_step(Pipeline(), optax.sgd(0.1), make_mesh(), BATCH)
        assert where(layer(state.params, 1)["kernel"]) == (set(range(8)), P("batch", "model"))
        assert where(layer(state.params, 1)["bias"]) == (set(range(8)), P())
        expected, _ = one_device(Pipeline(), optax.sgd(0.1), [BATCH] * 2)
        np.testing.assert_allclose(train(step, state, [BATCH] * 2)[0], expected, rtol=1e-5)

    def test_nothing_warns(self, monkeypatch):
        monkeypatch.setattr(unsplit, "_warned", False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step, state, _ = parallelize_step(Pipeline(explicit()), optax.sgd(0.1), make_mesh(), BATCH)
            step(state, BATCH)


class TestArguments:
    def test_signature_is_the_documented_one_with_a_key(self):
        parameters = inspect.signature(parallelize_step).parameters
        assert list(parameters)[:6] == [
            "model",
            "optimizer",
            "mesh",
            "global_batch",
            "local_batch",
            "replicate_inputs",
        ]
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        assert defaults == {"global_batch": None, "local_batch": None, "replicate_inputs": True, "rng": None}
        assert parameters["rng"].kind is inspect.Parameter.KEYWORD_ONLY

    @pytest.mark.parametrize(
        "batches, which", [({}, "neither"), (dict(global_batch=BATCH, local_batch=BATCH), "both")]
    )
    def test_exactly_one_batch(self, batches, which):
        with pytest.raises(ValueError, match=f"one of global_batch= and local_batch=, not {which}"):
            parallelize_step(Pipeline(), optax.sgd(0.1), make_mesh(), **batches)

    def test_other_types(self):
        with pytest.raises(TypeError, match="model is a linen Module"):
            parallelize_step(Pipeline, optax.sgd(0.1), make_mesh(), BATCH)
        with pytest.raises(TypeError, match="optimizer is an optax transformation, not 0.1"):
            parallelize_step(Pipeline(), 0.1, make_mesh(), BATCH)
        with pytest.raises(TypeError, match="mesh is a jax.sharding.Mesh or a MultiMesh"):
            parallelize_step(Pipeline(), optax.sgd(0.1), jax.devices(), BATCH)

    def test_the_loss_is_a_floating_scalar(self):
        class Returns(nn.Module):
            result: object

            @nn.compact
            def __call__(self, x):
                return self.result(nn.Dense(4)(x))

        for result, found in (
            (lambda y: y, r"float32\[16, 4\]"),
            (lambda y: jnp.argmax(y), r"int32\[\]"),
            (lambda y: (y.mean(), y), r"\('float32\[\]', 'float32\[16, 4\]'\)"),
        ):
            with pytest.raises(ValueError, match=rf"Returns.__call__.* not {found}"):
                parallelize_step(Returns(result), optax.sgd(0.1), make_mesh(), BATCH[0])

    def test_a_model_without_parameters(self):
        class Empty(nn.Module):
            def __call__(self, x):
                return jnp.mean(x)

        with pytest.raises(ValueError, match="Empty has no parameters"):
            parallelize_step(Empty(), optax.sgd(0.1), make_mesh(), BATCH[0])

    def test_a_task_that_the_mesh_does_not_fit(self):
        mesh = mm.MultiMesh(axis_sizes=(8,), axis_names=("data",))
        with pytest.raises(ValueError, match="task 'stage0': cannot slice along 'stage'"):
            parallelize_step(Pipeline(explicit()), optax.sgd(0.1), mesh, BATCH)
