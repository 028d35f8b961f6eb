"""What the contexts of `mm.jit` say about placement."""

from __future__ import annotations

from contextvars import ContextVar

recomputing: ContextVar[bool] = ContextVar("mmnnx_recomputing", default=True)
"""False inside `mm.enable_recomputation(False)`."""


fusing: ContextVar[str] = ContextVar("mmnnx_fusing", default="unsaid")
"""Where neighbouring tasks on one TaskMesh become one: "none", "loops" (microbatch loops alone) or "all".

"unsaid" is as "none", but all of a function that touches one TaskMesh is one.
"""
