"""What is known of a traced function before it is opened, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmnnx.mpmd.ir.listing import Names

if TYPE_CHECKING:
    from mmnnx.mpmd.frontend.function import Function


def function_text(function: Function, names: Names) -> str:
    """The meshes that a function touches, where its arguments live, and where its results go."""
    shardings, record = function.shardings, function.record
    labels = record.names()
    lines = [
        f"mesh {name}: devices {[d.id for d in m.devices.flat]}"
        for m, name in function.meshes.names().items()
    ]
    lines.append("arguments:")
    for label, aval, given in zip(labels, function.jaxpr.in_avals, shardings.given):
        where = (
            f"{given.spec} on {function.mesh_name(given)}" if given is not None else "nowhere in particular"
        )
        lines.append(f"  {label}: {aval.str_short()}, {where}")
    lines.append("results:")
    results = zip(record.results, function.jaxpr.out_avals, shardings.asked, shardings.follows)
    for n, (leaf, aval, asked, follows) in enumerate(results):
        name = str(leaf) if leaf is not None else f"result {n}"
        where = (
            f"{asked.spec} on {function.mesh_name(asked)}" if asked is not None else "where it is computed"
        )
        like = f", follows {labels[follows]}" if follows is not None else ""
        lines.append(f"  {name}: {aval.str_short()}, {where}{like}")
    return "\n".join(lines)
