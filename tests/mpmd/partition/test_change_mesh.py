"""Equations that were traced over one mesh, on the mesh of their task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mmnnx.mpmd.partition.change_mesh import change_mesh


def mesh(start: int, **sizes: int) -> Mesh:
    """A mesh of these axes, over devices from this one on."""
    count = int(np.prod([*sizes.values()]))
    return Mesh(np.array(jax.devices()[start : start + count]).reshape(*sizes.values()), tuple(sizes))


def mapped(over: Mesh):
    """A shard_map that sums over axis "x" alone."""
    f = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=over, in_specs=P("x"), out_specs=P())
    (eqn,) = jax.make_jaxpr(f)(jnp.ones(4)).eqns
    return eqn


@pytest.mark.parametrize(
    "sizes, words",
    [({"x": 2}, "uses axis 'x', which is of size 2 on its TaskMesh"), ({"y": 2}, "'x', which is not there")],
)
def test_a_shard_map_over_an_axis_of_another_size_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        change_mesh(mapped(mesh(0, x=4)), mesh(4, **sizes))


@pytest.mark.parametrize("sizes", [{"y": 4}, {"x": 2, "y": 2}, {"y": 2, "x": 2}])
def test_a_shard_map_over_as_many_devices_keeps_its_axes(sizes):
    here = mesh(4, **sizes)
    moved = change_mesh(mapped(mesh(0, x=4)), here)
    assert moved.params["mesh"] == mesh(4, x=4)
    assert change_mesh(moved, here) is moved


@pytest.mark.parametrize(
    "sizes, spec, expected",
    [
        ({"x": 4}, P("x"), P("x")),
        ({"y": 4}, P("x"), P("y")),
        ({"y": 2, "x": 2}, P("x"), mesh(4, x=4)),
        ({"y": 2}, P("x"), P(None)),
    ],
)
def test_a_constraint_over_another_mesh(sizes, spec, expected):
    """Of as many devices in one shape, axis by axis; in another, in its own; of others, by what is here."""
    over, here = jax.sharding.NamedSharding(mesh(0, x=4), spec), mesh(4, **sizes)
    constrain = lambda x: jax.lax.with_sharding_constraint(x, over)
    (eqn,) = jax.make_jaxpr(constrain)(jnp.ones(4)).eqns
    moved = change_mesh(eqn, here).params["sharding"]
    wanted = (expected, spec) if isinstance(expected, Mesh) else (here, expected)
    assert moved == jax.sharding.NamedSharding(*wanted)


@pytest.mark.parametrize("kind", ["device_put", "jit"])
def test_shardings_for_several_arrays_move_with_their_equation(kind):
    """Those that are parameters in a tuple: in a loop these equations stay as they were traced."""
    other = jax.sharding.NamedSharding(mesh(0, data=2), P("data"))
    put = {
        "device_put": lambda x: jax.device_put(x, other),
        "jit": jax.jit(jnp.sin, in_shardings=other, out_shardings=other),
    }[kind]
    (eqn,) = jax.make_jaxpr(put)(jnp.ones(4)).eqns
    here = mesh(4, data=2)
    moved = change_mesh(eqn, here)
    found = [s for v in moved.params.values() if type(v) is tuple for s in v]
    found = [s for s in found if isinstance(s, jax.sharding.NamedSharding)]
    assert found and all(s == jax.sharding.NamedSharding(here, P("data")) for s in found)
    assert change_mesh(moved, here) is moved
