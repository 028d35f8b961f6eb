"""Functions that do one thing each to a module: state, results and errors are those of nnx.jit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nnx.modes import FUNCTIONAL, GRAPH, TREE
from tests.slow import grid

X = np.ones(2, np.float32)


class Model(nnx.Module):
    """One of everything that a module may hold."""

    def __init__(self, array):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.full(2, 2.0))
        if array:
            self.array = nnx.data(jnp.full(2, 3.0))
        self.list = nnx.List([nnx.Param(jnp.full(2, 5.0))])
        self.static = 3
        self.numpy = nnx.Param(np.full(2, 7.0, np.float32))
        self.tree = nnx.Variable({"x": jnp.ones(2), "y": [jnp.zeros(2)]})
        self.rngs = nnx.Rngs(0)


def assigns_an_array(m, x):
    m.array = m.array + 1
    return m.array + x


def adds_a_variable(m, x):
    m.new = nnx.Param(x)
    return m.new[...]


def changes_a_static_attribute(m, x):
    m.static = 4
    return x * m.static


def deletes_a_variable(m, x):
    del m.b
    return m.a[...] + x


def replaces_a_variable(m, x):
    m.a = nnx.Param(x * 2)
    return m.a[...]


def extends_a_list(m, x):
    m.list.append(nnx.Param(x))
    m.list[0][...] += x
    return m.list[0][...]


def exchanges_and_updates(m, x):
    m.a, m.b = m.b, m.a
    m.a[...] += x


def sets_metadata(m, x):
    m.a.set_metadata(note=3)
    return x


def updates_a_part_of_a_tree(m, x):
    m.tree.set_value({"x": m.tree["x"] + x, "y": m.tree["y"]})
    return m.tree["y"][0]


def changes_the_structure_of_a_tree(m, x):
    m.tree.set_value({"z": x})


def gives_two_variables_one_value(m, x):
    m.a[...] = x
    m.b.set_value(m.a.get_value())
    return m.a[...], x


def changes_a_shape(m, x):
    m.a.set_value(jnp.zeros((3, 2)))
    return m.numpy[...] + x


def sets_values_of_the_host(m, x):
    m.a.set_value(np.zeros(2, np.float32))
    m.b.set_value(3.0)


def updates_all_parameters(m, x):
    nnx.update(m, jax.tree.map(lambda v: v * 2, nnx.state(m, nnx.Param)))


def draws(m, x):
    return jax.random.normal(m.rngs(), (2,)) + x


def returns_a_copy(m, x):
    return {"m": nnx.clone(m), "x": x}


def returns_new_variables_of_old_values(m, x):
    return nnx.Param(m.a), nnx.Dict(q=nnx.Param(m.b[...]), r=nnx.Param(x))


def returns_values_twice(m, x):
    return m.a.get_raw_value(), m.a.get_raw_value(), x


def returns_a_variable(m, x):
    return m.a


def returns_a_submodule(m, x):
    return m.list


def returns_state(m, x):
    return nnx.state(m)


FUNCTIONS = [
    f for f in list(globals().values()) if getattr(f, "__module__", "") == __name__ and f is not Model
]
STYLES = {"graph": GRAPH, "functional": FUNCTIONAL, "tree": TREE}


def contents(tree: Any) -> dict[Any, Any]:
    """The type and value of each Variable and array in a tree, by path."""

    def host(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tolist()

    flat = nnx.to_flat_state(nnx.state(tree, graph=True))
    return {path: (type(x).__name__, jax.tree.map(host, nnx.as_pure(x))) for path, x in flat}


def after_two_calls(f: Any, model: Model) -> Any:
    """What the second returns, and the model after it; or what went wrong."""
    try:
        f(model, X)
        return contents((f(model, X), model)), sorted(vars(model))
    except Exception as error:
        return type(error), str(error)[:20]


@functools.cache
def by_flax(fun: Any, style: str, donated: bool) -> Any:
    options = dict(donate_argnums=0) if donated else {}
    return after_two_calls(nnx.jit(fun, **options, **STYLES[style]), Model(array=not donated))


@pytest.mark.parametrize("fun, style, donated", grid(FUNCTIONS, [*STYLES], [False, True], step=3))
def test_two_calls(place, fun, style, donated):
    """An array that no Variable holds is gone for good once it is donated: donated models have none."""
    options = dict(donate_argnums=0) if donated else {}
    found = after_two_calls(place.jit(fun, **options, **STYLES[style]), place.put(Model(array=not donated)))
    assert found == by_flax(fun, style, donated)
