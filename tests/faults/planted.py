"""The faults of planted/: small mistakes to plant in the package, each with the tests that should notice it.

A fault is a slip that somebody could make: a wrong sign, an off-by-one, a missing factor, an entry of a state that is
not restored. Every one changes behavior. `python -m tests.faults` plants them one at a time and runs the tests.

There is a YAML file for each area of the package. baseline.json holds the test that caught each fault at one commit,
or null for a fault that was missed there; the tests that catch those came later. Faults in .cu files take minutes each:
the stand-in compiles the whole file again.
"""

from pathlib import Path
from typing import NamedTuple

import yaml


class Fault(NamedTuple):
    """A text of a file, which occurs there once, and what replaces it. The tests could notice, and take seconds."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


FAULTS = [
    Fault(file.stem, **entry)
    for file in sorted(Path(__file__).with_name("planted").glob("*.yaml"))
    for entry in yaml.load(file.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
]


def mistake(fault: Fault, tree: Path) -> str | None:
    """Return why a fault cannot be planted in a tree, or None."""
    count = (tree / fault.file).read_text("utf-8").count(fault.old)
    if count != 1 or fault.old == fault.new:
        return f"{fault.name}: {fault.file}: the old text occurs {count} times, or nothing is changed"
    return None
