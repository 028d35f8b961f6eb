"""Meshes with Explicit axes, as `jax.make_mesh` makes them: shardings are in types, as under nnx.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same
from tests.slow import few

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def make_mesh(stage=0, sizes=(2, 2), names=("data", "model")):
    return jax.make_mesh(sizes, names, devices=jax.devices()[4 * stage : 4 * stage + 4])


class Layer(nnx.Module):
    """A row-parallel product, whose result says how it is sharded."""

    def __init__(self, seed):
        self.a, self.b = (
            nnx.Param(jax.random.normal(key, (8, 8)) / 3) for key in jax.random.split(jax.random.key(seed))
        )
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.seen: list = nnx.static([])

    def __call__(self, x):
        self.steps[...] += 1
        x = jax.sharding.reshard(x, P("data"))
        hidden = jnp.tanh(x @ self.a[...])
        self.seen.append(jax.typeof(hidden).sharding.spec)
        return jnp.einsum("bh,ho->bo", hidden, self.b[...], out_sharding=P("data"))


def put(layer, mesh):
    """A layer whose weights are on a mesh: the first by columns, the second by rows."""
    for variable, spec in ((layer.a, P(None, "model")), (layer.b, P("model")), (layer.steps, P())):
        variable.set_value(jax.device_put(variable.get_value(), NamedSharding(mesh, spec)))
    return layer


def types(tree):
    """The types of all arrays, with the shardings in them."""
    return [str(jax.typeof(a)) for a in jax.tree.leaves(tree)]


def loss_fn(layers, x):
    for layer in layers:
        x = layer(x)
    return (x**2).mean()


def train(jit, layers, steps=2, size=None, **options):
    """(losses, parameters, optimizer state)."""
    layers = nnx.List(layers)
    optimizer = nnx.Optimizer(layers, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @jit(**options)
    def step(layers, optimizer, x):
        grad_fn = nnx.value_and_grad(loss_fn)
        if size is not None:
            grad_fn = mm.microbatch(grad_fn, dim=0, size=size, argnum=1, reduce="mean")
        loss, grads = grad_fn(layers, x)
        optimizer.update(layers, grads)
        return loss

    losses = [step(layers, optimizer, X + n) for n in range(steps)]
    return losses, nnx.state(layers), nnx.state(optimizer, nnx.optimizer.OptState)


@few(1)
@pytest.mark.parametrize("where", ["set_mesh", "arguments"])
def test_a_train_step_on_one_mesh(where):
    """As under nnx.jit, in types of results too; without jax.set_mesh the mesh is that of the arguments."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        expected = train(nnx.jit, [put(Layer(0), mesh)])
        if where == "set_mesh":
            got = train(mm.jit, [put(Layer(0), mesh)])
    if where == "arguments":
        got = train(mm.jit, [put(Layer(0), mesh)])
    assert_same(got, expected)
    assert types(got) == types(expected)
    assert {a.sharding.mesh for a in jax.tree.leaves(got[1])} == {mesh}


@few(1)
@pytest.mark.parametrize("size", [None, 4], ids=["whole", "microbatches"])
def test_a_train_step_on_two_meshes(size):
    """Types inside of tasks are those on one mesh, and results have them."""
    meshes = [make_mesh(n) for n in range(2)]
    with jax.set_mesh(meshes[0]):
        expected = train(nnx.jit, [put(Layer(n), meshes[0]) for n in range(2)], size=size)
    layers = [put(Layer(n), mesh) for n, mesh in enumerate(meshes)]
    got = train(mm.jit, layers, size=size)
    assert_same(got, expected)
    for n, mesh in enumerate(meshes):
        assert types(got[1][n]) == types(expected[1][n])
        assert {a.sharding.mesh for a in jax.tree.leaves(got[1][n])} == {mesh}
        assert set(layers[n].seen) == {P("data", "model")}


def tasks_of(*meshes):
    """A task for each mesh, and where they place Layers."""
    tasks = [mm.Task(f"task{n}", mesh=mesh) for n, mesh in enumerate(meshes)]
    rules = {}
    for n, task in enumerate(tasks):
        rules |= {mm.path(n, "a"): (task, P(None, "model")), mm.path(n, "b"): (task, P("model"))}
        rules |= {mm.path(n): (task, P())}
    return tasks, mm.TaskSharding(rules)


@few(1)
@pytest.mark.parametrize("scopes", [False, True], ids=["placed", "scopes"])
def test_state_placed_by_tasks_on_such_meshes(scopes):
    """It is born with shardings in its types; in the scope of a task specs name the axes of its mesh."""
    meshes = [make_mesh(n) for n in range(2)]
    tasks, placement = tasks_of(*meshes)
    with jax.set_mesh(meshes[0]):
        expected = train(nnx.jit, [put(Layer(n), meshes[0]) for n in range(2)])
    layers = mm.jit(lambda: nnx.List([Layer(n) for n in range(2)]), out_shardings=placement)()
    assert str(jax.typeof(layers[1].a.get_value())) == "float32[8,8@model]"
    assert layers[1].a.get_value().sharding == NamedSharding(meshes[1], P(None, "model"))
    if scopes:
        layers = nnx.List([mm.task(layer, task=task) for layer, task in zip(layers, tasks)])
    assert_same(train(mm.jit, layers), expected)
    assert layers[1].a.get_value().sharding == NamedSharding(meshes[1], P(None, "model"))
    assert set(layers[1].seen) == {P("data", "model")}


def test_a_scope_of_a_task_is_the_mesh_of_specs():
    """Whatever the arguments: nothing is placed, nor is jax.set_mesh used."""
    mesh, seen = make_mesh(1), []

    def f(x):
        x = jax.sharding.reshard(jnp.sin(x), P("data"))
        seen.append(jax.typeof(x).sharding.spec)
        return mm.with_sharding_constraint(2 * x, P("data", "hidden"))

    task = mm.Task("t", mesh=mesh, logical_axes={"hidden": "model"})
    got = mm.jit(mm.task(f, task=task))(X)
    assert_same(got, 2 * np.sin(X))
    assert seen == [P("data", None)] and got.sharding == NamedSharding(mesh, P("data", "model"))


def test_what_a_function_does_with_types():
    """Products, gathers, loops, conds, Auto axes inside, unreduced sums: on two meshes as on one."""

    def f(w, v, x):
        y = jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", None, unreduced={"model"}))
        y = jnp.tanh(jax.sharding.reshard(y + y, P("data", "model")))
        y = jax.sharding.auto_axes(lambda y: jnp.sort(y, axis=1), out_sharding=P("data", "model"))(y)
        rows = y.at[jnp.array([1, 0])].get(out_sharding=P(None, "model"))
        start = jnp.zeros(8, out_sharding=P("model"))
        total, _ = jax.lax.scan(lambda c, r: (c + r, None), start, jax.sharding.reshard(y, P(None, "model")))
        y = jax.lax.cond(rows.sum() > 0, jnp.sin, jnp.cos, y)
        y = jax.shard_map(
            lambda y: jax.lax.psum(y, "model"), in_specs=P("data", "model"), out_specs=P("data")
        )(y)
        return jnp.einsum("ij,jk->ik", y, v, out_sharding=P("data")), total, rows.reshape(2, 4, 2)

    w, v = np.cos(X), np.sin(X[:4])
    specs = P("model"), P(None, "data"), P("data", "model")
    meshes = [make_mesh(n) for n in range(2)]
    with jax.set_mesh(meshes[0]):
        expected = nnx.jit(f)(*(jax.device_put(a, s) for a, s in zip((w, v, X), specs)))
    there = [NamedSharding(meshes[n], s) for n, s in zip((0, 1, 0), specs)]
    got = mm.jit(f)(*map(jax.device_put, (w, v, X), there))
    assert_same(got, expected)
    assert types(got) == types(expected)
    assert [a.sharding.mesh for a in got] == [meshes[1], meshes[0], meshes[0]]


def test_meshes_of_other_axes_count_as_auto():
    """No type has shardings over two meshes: between them values have none, as on Auto axes."""
    meshes = make_mesh(0), make_mesh(1, (4,), ("all",))
    w, v = (jax.device_put(X, NamedSharding(m, P(m.axis_names[-1]))) for m in meshes)
    seen = []

    def f(w, v, x):
        seen.append(str(jax.typeof(w)))
        return jnp.sin(x @ w) @ v

    got = mm.jit(f)(w, v, X)
    assert_same(got, nnx.jit(lambda w, v, x: jnp.sin(x @ w) @ v)(X, X, X))
    assert seen == ["float32[8,8]"] and got.sharding.mesh == meshes[1]
    with pytest.raises(ValueError) as error:
        mm.jit(lambda w, v: jax.sharding.reshard(w, P("data")) @ v)(w, v)
    (note,) = (note for note in error.value.__notes__ if "Explicit" in note)
    assert "{'data': 2, 'model': 2} and {'all': 4}" in note and "over one mesh alone" in note


def test_what_types_do_not_suit_counts_as_auto():
    """Where JAX would have the function say how a result is sharded, XLA decides; not under jax.set_mesh."""
    mesh = make_mesh()
    x, w = (jax.device_put(X, NamedSharding(mesh, P("data", "model"))) for _ in range(2))
    f = lambda x, w: jnp.sin(x @ w @ w.T)
    got = mm.jit(f)(x, w)
    assert_same(got, nnx.jit(f)(X, X))
    assert got.sharding.mesh == mesh
    with pytest.raises(Exception, match=r"[Cc]ontracting dimensions") as error:
        mm.jit(lambda x, w: jax.sharding.reshard(f(x, w), P("data")))(x, w)
    assert any("'data': 2" in note and "AxisType.Auto" in note for note in error.value.__notes__)
    with jax.set_mesh(mesh), pytest.raises(Exception, match=r"[Cc]ontracting dimensions"):
        mm.jit(f)(x, w)


def test_scopes_of_tasks_with_other_axes():
    """In each, specs name its axes; values between them have no shardings in their types."""
    tasks = [mm.Task("a", mesh=make_mesh(0)), mm.Task("b", mesh=make_mesh(1, (4,), ("all",)))]
    a, b = (mm.task(f, task=task) for f, task in zip((jnp.sin, jnp.cos), tasks))
    assert_same(mm.jit(lambda x: b(a(x)))(X), np.cos(np.sin(X)))


def test_on_a_multimesh_the_error_says_where_types_have_shardings():
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "data"))
    reshard = mm.task(
        lambda x: jax.sharding.reshard(x, P("data")), task=mm.Task("t", mesh_slice={"stage": 1})
    )
    with mesh, pytest.raises(ValueError, match="reshard|PartitionSpec") as error:
        mm.jit(reshard)(X)
    assert any("MultiMesh are Auto" in note and "jax.make_mesh" in note for note in error.value.__notes__)


def test_without_splitting():
    """mm.ignore_transforms runs all on one device, which has no axes."""
    x = jax.device_put(X, NamedSharding(make_mesh(), P("data")))
    with mm.ignore_transforms():
        assert_same(mm.jit(lambda x: jnp.sin(x).sum(0))(x), np.sin(X).sum(0))


def test_one_program_for_all_calls():
    """State that a function returns as it was keeps its spec as it was written."""
    layers = nnx.List([put(Layer(n), make_mesh(n)) for n in range(2)])
    f = mm.jit(loss_fn)
    for _ in range(2):
        f(layers, X)
    assert len({id(variant) for variant in f._inner.variants.values()}) == 1


def test_an_unreduced_result_is_refused():
    """By axis; as the result of one jax.jit it is what nnx.jit returns."""
    meshes = [make_mesh(n) for n in range(2)]
    spec = P("data", None, unreduced={"model"})
    f = lambda x, w, v: (jnp.einsum("ij,jk->ik", x, w, out_sharding=spec), 2 * v)
    x, w = (jax.device_put(X, NamedSharding(meshes[0], s)) for s in (P("data", "model"), P("model")))
    v = [jax.device_put(X, NamedSharding(mesh, P("data"))) for mesh in meshes]
    with pytest.raises(ValueError, match=r"result 0.*unreduced over axis 'model'.*jax\.sharding\.reshard"):
        mm.jit(f)(x, w, v[1])
    assert mm.jit(f)(x, w, v[0])[0].sharding.spec == spec


def test_rules_for_such_meshes():
    """in_shardings and out_shardings over one, without jax.set_mesh."""
    mesh = make_mesh()
    for options in (
        dict(out_shardings=NamedSharding(mesh, P("data", "model"))),
        dict(in_shardings=NamedSharding(mesh, P("model"))),
    ):
        got, expected = (jit(lambda x: jnp.sin(2 * x), **options)(X) for jit in (mm.jit, nnx.jit))
        assert_same(got, expected)
        assert got.sharding.mesh == mesh and got.sharding.is_equivalent_to(expected.sharding, 2)
