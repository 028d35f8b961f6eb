"""How the help of a command shows its options."""

from __future__ import annotations

from typing import Any

import tyro


def optional(metavar: str, default: str) -> Any:
    """How the help shows an option that may be left out: `default` says what holds then."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")
