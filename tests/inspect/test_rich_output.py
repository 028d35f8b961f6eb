"""Tables on narrow terminals."""

from __future__ import annotations

import pytest
from rich.console import Console, Group
from rich.table import Table

from mmnnx.inspect.rich_output import print_table

WORDS = ["fragment", "temporaries", "stage0", "forward", "1,234,567.8", "interleaved-zero-bubble"]


def table() -> Table:
    found = Table("fragment", "temporaries", "schedule")
    found.add_row("stage0 forward and backward of every microbatch", "1,234,567.8", "interleaved-zero-bubble")
    return found


@pytest.mark.parametrize("width", [1, 20, 55, 58, 60, 100])
@pytest.mark.parametrize("shown", [table, lambda: Group("above it", table(), table())])
def test_no_word_is_cut(width, shown, capsys):
    console = Console(width=width)
    print_table(console, shown())
    out = capsys.readouterr().out
    assert all(out.count(word) >= 1 for word in WORDS) and "…" not in out
    assert console.width == width


def test_cells_are_folded_where_that_is_enough(capsys):
    print_table(Console(width=70), table())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    assert not any("stage0 forward and backward of every microbatch" in line for line in lines)
