"""What is told about the sharding of values is what XLA makes of the same equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx.mpmd.hoist.sharding_propagation import follow
from mmnnx.mpmd.ir.shardings import spec_of


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum(1)), x, w)


B = P("data")
CASES = {
    "elementwise": (lambda x, y: jnp.where(x > 0, x * y, jnp.exp(y)), [(8, 4), (8, 4)], [B, P()]),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (8, 3, 4)), [(8, 4)], [B]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [(8, 4, 6)], [P("data", "model")]),
    "merge": (lambda x: x.reshape(24, 4), [(8, 3, 4)], [P("data", None, "model")]),
    "split": (lambda x: x.reshape(8, 2, 2, 5), [(8, 4, 5)], [P("data", "model")]),
    "ones": (lambda x: x.reshape(1, 8, 1, 4)[0, :, 0], [(8, 4)], [P("data", "model")]),
    "reduction": (lambda x: (x.sum(1), x.max(0)), [(8, 4)], [P("data", "model")]),
    "product": (lambda x, w: x @ w, [(8, 3, 4), (4, 6)], [B, P(None, "model")]),
    "contraction": (lambda x, y: jnp.einsum("bsd,bsf->df", x, y), [(8, 3, 4), (8, 3, 6)], [B, B]),
    "batched": (lambda x, y: jnp.einsum("bhd,bhe->bhde", x, y), [(8, 2, 4), (8, 2, 4)], [B, P()]),
    "lookup": (lambda w, i: w[i.astype(int)], [(16, 4), (8, 3)], [P(), B]),
    "both ends": (lambda x: (x[:, 1:], jnp.pad(x, ((0, 0), (1, 1)))), [(8, 4)], [B]),
    "join": (lambda x, y: jnp.concatenate([x, y], 1), [(8, 4), (8, 2)], [B, B]),
    "calls": (lambda x: doubled(jax.nn.relu(jax.jit(jnp.sin)(x))), [(8, 4)], [B]),
    "checkpoint": (lambda x, w: jax.checkpoint(jnp.dot)(x, w), [(8, 4), (4, 4)], [B, P()]),
    "scan": (layers, [(8, 4), (3, 4, 4)], [B, P()]),
    "constraint": (
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(P.UNCONSTRAINED, "model"))) + 1,
        [(8, 4)],
        [B],
    ),
}


@jax.jit
def shard_mapped(x, w):
    product = lambda x, w: (x @ w)[None]
    specs = (P(None, "data"), P("data", "model"))
    return jax.shard_map(product, mesh=mesh(), in_specs=specs, out_specs=P("data", None, "model"))(x, w)


CASES["shard_map"] = (shard_mapped, [(8, 4), (4, 6)], [P(), P()])


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_xla_does(name):
    fun, shapes, specs = CASES[name]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
        for shape, spec in zip(shapes, specs)
    ]
    jaxpr = jax.make_jaxpr(fun)(*args)
    known = {
        v: tuple(() if e is None else (e,) for e in (*spec, *[None] * (v.aval.ndim - len(spec))))
        for v, spec in zip(jaxpr.jaxpr.invars, specs)
    }
    follow(jaxpr.jaxpr.eqns, known)
    compiled = jax.jit(fun).lower(*args).compile()
    for v, sharding in zip(jaxpr.jaxpr.outvars, jax.tree.leaves(compiled.output_shardings)):
        found = P(*(axes or None for axes in known.get(v, ())))
        assert NamedSharding(mesh(), found).is_equivalent_to(sharding, v.aval.ndim), (found, sharding)
        assert NamedSharding(mesh(), spec_of(sharding, mesh(), v.aval.shape)).is_equivalent_to(
            sharding, v.aval.ndim
        )


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "y"), P(("x", "y")), P(("y", "x")), P("y", None, "x")], ids=str
)
def test_a_sharding_is_told_in_names_of_axes(spec):
    other = NamedSharding(Mesh(mesh().devices, ("x", "y")), spec)
    found = spec_of(other, mesh(), (8, 6, 4))
    assert NamedSharding(mesh(), found).is_equivalent_to(other, 3)


def test_a_sharding_that_no_spec_says_is_refused():
    """Four devices along one axis, two dimensions divided in two: no axis does that."""
    line = Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(ValueError, match=r"no PartitionSpec over a mesh of \{'data': 4\}.*constraint"):
        spec_of(NamedSharding(mesh(), P("data", "model")), line, (8, 4))
