"""Mutation testing: inject one fault at a time into a copy of the repository, and report which test catches it.

    python -m tests.faults                                   # all faults
    python -m tests.faults residual-not-restored ...         # selected faults
    python -m tests.faults --area kernels --tree ../other    # in another working tree

First, the tests run without a fault. Only tests that `make test` runs (`make test-standin` for the area cuda) can catch
a fault. The exit code is 1 if a fault is missed, 2 if a fault does not exist or tests fail without one.
"""

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

from tests.faults.planted import FAULTS, Fault, mistake

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".hypothesis", "outputs")
TIMEOUT_S = 600
NO_TESTS = 5  # pytest's exit code if every test is deselected
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE")
TEST_STANDIN = "not slow and not gpu"
TEST = f"{TEST_STANDIN} and (not device_code or smoke)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Plant faults, and see who notices.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; all by default")
    parser.add_argument("--area", help="all faults of an area")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the working tree to copy; this one by default")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write fault -> the test that caught it as JSON")
    options = parser.parse_args()
    names = set(options.names) or {fault.name for fault in FAULTS}
    faults = [fault for fault in FAULTS if fault.name in names and options.area in (None, fault.area)]
    wrong = [line for fault in faults if (line := mistake(fault, options.tree))]
    wrong += [f"there is no fault {name}" for name in names - {fault.name for fault in FAULTS}]
    if wrong or not faults:
        print(*wrong, f"{len(faults)} faults", sep="\n", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        clean = Path(folder, "clean")
        shutil.copytree(options.tree, clean, ignore=LEFT_OUT)
        code, output = tested(clean, list(dict.fromkeys(test for fault in faults for test in fault.tests)))
        print("without a fault", output.strip().splitlines()[-1], flush=True)
        if code:
            print(output, file=sys.stderr)
            return 2
        caught = {fault.name: caught_by(fault, clean, Path(folder, "planted")) for fault in faults}
    if options.write:
        options.write.write_text(json.dumps(caught, indent=2) + "\n")
    missed = [name for name, test in caught.items() if test is None]
    print(f"{len(caught) - len(missed)} caught, {len(missed)} missed{': ' * bool(missed)}{', '.join(missed)}")
    return int(bool(missed))


def caught_by(fault: Fault, clean: Path, place: Path) -> str | None:
    """Return the test that fails with this fault in a copy of `clean`, or None."""
    shutil.copytree(clean, place)  # with caches of kernels and bytecode, which stay valid because timestamps are kept
    file = place / fault.file
    file.write_text(file.read_text("utf-8").replace(fault.old, fault.new), "utf-8")
    began = time.monotonic()
    code, output = tested(place, fault.tests, TEST_STANDIN if fault.area == "cuda" else TEST)
    shutil.rmtree(place)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    test = found[1] if found else f"exit code {code}" if code else None
    seconds = time.monotonic() - began
    print(f"{'caught' if test else 'MISSED'}  {fault.area:<10} {fault.name} ({seconds:.0f} s): {test}", flush=True)
    return test


def tested(tree: Path, tests: Sequence[str], marks: str = TEST_STANDIN) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    line = [sys.executable, *PYTEST, "-m", marks, *tests]
    try:
        done = subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, f"FAILED a test that took over {TIMEOUT_S} s"
    return done.returncode if done.returncode != NO_TESTS else 0, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
