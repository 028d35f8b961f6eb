"""The table in flax.md is of tests that there are."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_table_exists():
    table = (HERE / "flax.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    missing = {(f, name) for f, name in named if f"\ndef {name}(" not in (HERE / f).read_text()}
    assert len(named) > 67 and not missing
    assert (
        len(re.findall(r"^\| test_\w+ \|", table, re.M)) == 27 + 27 + 13
    )  # the methods of Flax's three classes
