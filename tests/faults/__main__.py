"""Plant one fault at a time in a copy of the repository, and see which test notices.

    python -m tests.faults                                   # all of them
    python -m tests.faults residual-not-restored ...         # these
    python -m tests.faults --area kernels --tree ../other    # of another working tree

The tests run without any fault first. `make test` has to catch a fault, or `make test-standin` if its area is cuda:
other tests are not run. The exit code is 1 if a fault is missed, 2 if nothing can be said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.planted import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".hypothesis", "outputs")
TIMEOUT_S = 600
NO_TESTS = 5  # pytest's exit code if the marks leave none
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE")
QUICK = "not slow and not gpu"
MAKE_TEST = f"{QUICK} and (not device_code or smoke)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Plant faults, and see who notices.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; all by default")
    parser.add_argument("--area", help="all faults of an area")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the working tree to copy; this one by default")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write fault -> the test that caught it as JSON")
    options = parser.parse_args()
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    faults = [
        fault
        for fault in FAULTS
        if (not options.names or fault.name in options.names) and options.area in (None, fault.area)
    ]
    wrong = [line for fault in faults if (line := mistake(fault, options.tree))]
    wrong += [f"there is no fault {name}" for name in sorted(unknown)]
    if wrong or not faults:
        print(*(wrong or ["no such fault"]), sep="\n", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        clean = Path(folder, "clean")
        shutil.copytree(options.tree, clean, ignore=LEFT_OUT)
        print("without a fault", end=" ", flush=True)
        code, said = tested(clean, list(dict.fromkeys(test for fault in faults for test in fault.tests)))
        print(said.strip().splitlines()[-1])
        if code:
            print(said, file=sys.stderr)
            return 2
        caught = {fault.name: planted(fault, clean, Path(folder, "planted")) for fault in faults}
    if options.write:
        options.write.write_text(json.dumps(caught, indent=2) + "\n")
    missed = [name for name, test in caught.items() if test is None]
    print(f"{len(caught) - len(missed)} caught, {len(missed)} missed{': ' * bool(missed)}{', '.join(missed)}")
    return int(bool(missed))


def mistake(fault: Fault, tree: Path) -> str | None:
    """Return why a fault cannot be planted in a tree, or None."""
    file = tree / fault.file
    count = file.read_text("utf-8").count(fault.old) if file.is_file() else -1
    if count == 1 and fault.old != fault.new:
        return None
    reason = "there is no such file" if count < 0 else f"the old text occurs {count} times"
    return f"{fault.name}: {fault.file}: {reason if count != 1 else 'nothing is changed'}"


def planted(fault: Fault, clean: Path, place: Path) -> str | None:
    """Return the test that fails with this fault in a copy of `clean`, or None."""
    shutil.copytree(clean, place)  # with compiled kernels and bytecode, and with the times they are valid for
    file = place / fault.file
    file.write_text(file.read_text("utf-8").replace(fault.old, fault.new), "utf-8")
    began = time.monotonic()
    code, said = tested(place, fault.tests, QUICK if fault.area == "cuda" else MAKE_TEST)
    shutil.rmtree(place)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    test = found[1] if found else f"exit code {code}" if code else None
    seconds = time.monotonic() - began
    print(f"{'caught' if test else 'MISSED'}  {fault.area:<10} {fault.name} ({seconds:.0f} s): {test}", flush=True)
    return test


def tested(tree: Path, tests: Sequence[str], marks: str = QUICK) -> tuple[int, str]:
    """Run these tests of a tree, of those with the marks: pytest's exit code, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    line = [sys.executable, "-m", "pytest", *PYTEST, "-m", marks, *tests]
    try:
        done = subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"FAILED a test that took over {TIMEOUT_S} s"
    return done.returncode if done.returncode != NO_TESTS else 0, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
