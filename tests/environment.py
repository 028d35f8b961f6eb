"""The environment of processes that tests start: they compile as the tests do, on devices of their own."""

from __future__ import annotations

import os


def flags() -> str:
    """The XLA_FLAGS of the tests, but for the number of devices."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)


def environment() -> dict[str, str]:
    """Without anything that was said to JAX or mmnnx from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "MMNNX_"))}
    limit = "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(), limit: os.environ[limit]}
