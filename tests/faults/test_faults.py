"""The list of seeded faults fits the code, so that `python -m tests.faults` can make each of them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_a_text_that_is_there_once(fault: Fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old


def test_names_are_kebab_case_and_unique():
    assert not [fault.name for fault in FAULTS if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.name)]
    assert not [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]


def test_the_tests_that_faults_name_are_in_files_that_are_there():
    files = {test.partition("::")[0] for fault in FAULTS for test in fault.tests}
    assert not [file for file in files if not (ROOT / file).exists()]
