"""What processes say of programs that differ, in one line."""

from __future__ import annotations

import pytest

from mmnnx.mpmd.distributed.agreement import EXCERPT, _difference

LONG = "x" * 3 * EXCERPT


@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        ("step: 2 calls\na\nb", "step: 3 calls\na\nc", "line 3 is 'b' in process 0, and 'c' in process 2"),
        (
            "step: 2 calls\na",
            "step: 3 calls\na",
            "line 1 is 'step: 2 calls' in process 0, and 'step: 3 calls'",
        ),
        ("step\na", "step\na\nb", "line 3 is missing in process 0, and 'b' in process 2"),
        (
            f"step\n{LONG} mul 1.0 {LONG}",
            f"step\n{LONG} mul 2.0 {LONG}",
            f"line 2 is '...{'x' * 35} mul 1.0 {'x' * 36}...' in process 0, and '...{'x' * 35} mul 2.0 ",
        ),
    ],
)
def test_the_first_line_that_differs_is_named_with_what_is_around_it(text, other, said):
    """The first line of all counts what a program has: it is named only if no other differs."""
    message = _difference(text, other, 2)
    assert said in message and len(message) < 400
