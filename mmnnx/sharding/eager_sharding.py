"""Flax's eager sharding is off inside a MultiMesh: what is said where Variables show that."""

from __future__ import annotations

ADVICE = (
    "Variables that are made inside of `with MultiMesh(...)` have eager_sharding=False, as their mesh is "
    "found later; others have True. Make both there, or the other ones inside of "
    "`with nnx.use_eager_sharding(False):`"
)


def advise_on_eager_sharding(error: BaseException | None) -> None:
    """Adds advice to JAX's error about trees of Variables that differ in this, and has none yet."""
    text = str(error) if isinstance(error, ValueError) else ""
    both = all(f"('eager_sharding', {value})" in text for value in (True, False))
    if both and error is not None and ADVICE not in getattr(error, "__notes__", ()):
        error.add_note(ADVICE)
