"""What `mm.fetch` brings, and what it and the watch leave behind."""

from __future__ import annotations

import re

import pytest

from tests.processes.harness import run
from tests.slow import all_but


@pytest.mark.parametrize("count", all_but([2], [2, 3]))
def test_values_come_to_all_and_the_store_forgets_them(count):
    """51 fetches that processes each say something for; of no more than two blocks of 8 is it kept."""
    for printed in run("fetch.py", count, 2):
        (keys,) = re.findall(r"keys: (\d+)", printed)
        assert int(keys) <= 2 * (count * 8 + 1)
        assert "threads: 0\n" in printed
