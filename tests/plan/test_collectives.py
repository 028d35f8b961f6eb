"""What devices send each other, read from what XLA wrote."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx.plan.collectives import Collective, collectives
from mmnnx.plan.hlo import parse

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def compiled(f, *args):
    placed = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(MESH, spec)) for s, spec in args]
    return parse(jax.jit(f).lower(*placed).compile().as_text())


def mapped(f, spec=P("data", "model"), out=None):
    return jax.shard_map(f, mesh=MESH, in_specs=spec, out_specs=spec if out is None else out, check_vma=False)


@pytest.mark.parametrize("axes, devices", [(("model",), 4), (("data",), 2), (("data", "model"), 8)])
def test_a_sum_over_axes(axes, devices):
    (found,) = collectives(
        compiled(mapped(lambda x: lax.psum(x, axes)), ((64, 64), P("data", "model"))), MESH
    )
    assert found == Collective("all-reduce", axes, devices, 32 * 16 * 4, 1)
    assert found.sent == 2 * found.nbytes * (devices - 1) / devices


def test_other_kinds():
    gather = compiled(
        mapped(lambda x: lax.all_gather(x, "model", axis=1, tiled=True), out=P("data")),
        ((64, 64), P("data", "model")),
    )
    assert collectives(gather, MESH) == [Collective("all-gather", ("model",), 4, 32 * 64 * 4, 1)]
    for axis, pairs in (("data", [(0, 1), (1, 0)]), ("model", [(0, 0), (1, 2), (2, 3), (3, 1)])):
        turn = functools.partial(lax.ppermute, axis_name=axis, perm=pairs)
        move = compiled(mapped(turn), ((64, 64), P("data", "model")))
        (found,) = collectives(move, MESH)
        assert (found.kind, found.axes, found.sent) == ("collective-permute", (axis,), 32 * 16 * 4)
    assert collectives(compiled(lambda x: x + 1, ((64, 64), P("data"))), MESH) == []


def test_in_a_loop_it_counts_for_each_iteration():
    def body(x, _):
        return lax.psum(x, "model") / 2, None

    (found,) = collectives(
        compiled(mapped(lambda x: lax.scan(body, x, None, length=7)[0]), ((64, 64), P("data", "model"))), MESH
    )
    assert found.count == 7 and found.nbytes == 7 * 32 * 16 * 4


TPU = """
HloModule jit_f

ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %a = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  ROOT %b = bf16[8,4]{1,0} all-reduce(%a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}
"""


def test_groups_as_other_compilers_write_them():
    found = {c.axes: c for c in collectives(parse(TPU), MESH)}
    assert set(found) == {("model",), ("data",)}
    assert found["model",].devices == 4 and found["data",].devices == 2
    assert found["model",].nbytes == 8 * 4 * 2


SEVERAL = """
HloModule jit_f

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %a = (f32[8,4]{1,0}, f32[16]{0}, f32[]) all-reduce(%p, %q, %r), replica_groups={{0,1,2,3}}, to_apply=%add
  %g = ((f32[8], f32[4]), (f32[32], f32[16])) all-gather-start(%q, %r), replica_groups={{0,1,2,3}}
  %c = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1},{1,0}}
  ROOT %s = (f32[8,4], f32[2]) reduce-scatter(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_several_arrays_that_go_together():
    found = {c.kind: c.nbytes for c in collectives(parse(SEVERAL), MESH)}
    assert found == {
        "all-reduce": 4 * (8 * 4 + 16 + 1),
        "all-gather": 4 * (32 + 16),
        "collective-permute": 4 * 8,
        "reduce-scatter": 4 * 4 * (8 * 4 + 2),
    }


@pytest.mark.parametrize("branches", [2, 3])
def test_a_conditional(branches):
    """Two branches are written otherwise than three."""
    sums = lambda x: lax.psum(x, "model")
    choose = lambda x: lax.switch((x[0, 0] > 0) * 1, [lambda x: x] * (branches - 1) + [sums], x)
    (found,) = collectives(compiled(mapped(choose), ((64, 64), P("data", "model"))), MESH)
    assert (found.kind, found.axes, found.nbytes) == ("all-reduce", ("model",), 32 * 16 * 4)


def test_what_goes_over_the_network():
    """Groups of GPUs on several hosts, and the same groups within one."""

    @dataclasses.dataclass(frozen=True)
    class Gpu:
        process_index: int
        platform: str = "gpu"

    for hosts, across in (
        ([[0] * 4, [1] * 4], {"data"}),
        ([[0, 0, 1, 1]] * 2, {"model"}),
        ([[2] * 4] * 2, set()),
    ):
        mesh = types.SimpleNamespace(
            devices=np.array([[Gpu(n) for n in row] for row in hosts], object),
            size=8,
            axis_names=MESH.axis_names,
        )
        found = collectives(parse(TPU), mesh)
        assert {c.axes[0] for c in found if c.across} == across and len(found) == 2
