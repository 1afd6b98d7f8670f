"""The planted faults fit the code as it is; `python -m tests.faults` plants them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.faults.__main__ import ROOT, mistake
from tests.faults.planted import FAULTS


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_no_fault_of_the_baseline_is_lost() -> None:
    baseline = json.loads(Path(__file__).with_name("baseline.json").read_text())["caught"]
    assert baseline.keys() <= {fault.name for fault in FAULTS}


def test_every_fault_can_be_planted() -> None:
    assert [line for fault in FAULTS if (line := mistake(fault, ROOT))] == []
    for fault in FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text("utf-8") or not name, test
