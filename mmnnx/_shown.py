"""How a notebook shows what is defined below `mmnnx.inspect`, which has the pictures and the tables."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection
from typing import Any


@functools.singledispatch
def notebook_bundle(x: Any) -> Any:
    """What `_repr_mimebundle_` returns; `mmnnx.inspect.notebook` registers it for each class."""
    return {"text/plain": repr(x)}


class Shown:
    """Shows itself in a notebook, by IPython's protocol, as `notebook_bundle` says."""

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> Any:
        importlib.import_module(
            "mmnnx.inspect.notebook"
        )  # a layer above, which nothing else may have asked for
        return notebook_bundle(self)
