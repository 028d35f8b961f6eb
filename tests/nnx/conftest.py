"""`place` is there for all of these tests."""

from tests.nnx.modes import place  # noqa: F401
