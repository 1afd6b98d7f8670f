"""The planted faults match the current code. `python -m tests.faults` plants them."""

import json
from functools import cache
from pathlib import Path

from tests.faults.planted import FAULTS, mistake
from tests.support.commands import ROOT


def test_no_fault_of_the_baseline_is_lost_and_names_are_unique() -> None:
    names = {fault.name for fault in FAULTS}
    baseline = json.loads(Path(__file__).with_name("baseline.json").read_text())["caught"]
    assert len(names) == len(FAULTS) and baseline.keys() <= names


def test_every_fault_can_be_planted_and_its_tests_exist() -> None:
    text = cache(lambda file: (ROOT / file).read_text("utf-8"))
    for fault in FAULTS:
        assert mistake(fault, ROOT) is None and fault.tests
        for test in fault.tests:
            file, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in text(file), test
