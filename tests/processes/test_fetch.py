"""What `mm.fetch` brings, and what it and the watch leave behind."""

from __future__ import annotations

import re

from tests.processes.harness import run


def test_values_come_to_all_and_the_store_forgets_them():
    """51 fetches that three processes each say something for; of no more than two blocks of 8 is it kept."""
    for printed in run("fetch.py", 3, 2):
        (keys,) = re.findall(r"keys: (\d+)", printed)
        assert int(keys) <= 2 * (3 * 8 + 1)
        assert "threads: 0\n" in printed
