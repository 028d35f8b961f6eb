"""Scan equations: their operands, and scans like others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex


def split_operands(
    args: Sequence[Any], num_consts: int, num_carry: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Operands of a scan: constants, carries, and what it goes over."""
    rest = args[num_consts:]
    return list(args[:num_consts]), list(rest[:num_carry]), list(rest[num_carry:])


def run_scan(
    jaxpr: Any, num_consts: int, num_carry: int, like: dict[str, Any], *args: jax.Array
) -> list[jax.Array]:
    """A scan like another one, whose body is a jaxpr over constants, carries and slices."""
    consts, init, xs = split_operands(args, num_consts, num_carry)

    def body(carry: Any, row: Any) -> Any:
        made = jex.jaxpr_as_fun(jaxpr)(*consts, *carry, *row)
        return made[:num_carry], made[num_carry:]

    params = {name: like[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, init, xs, **params)
    return [*carry, *ys]
