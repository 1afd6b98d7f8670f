"""Installs the wheel with every interpreter at hand and every extra, and trains: `make wheels`.

Each pair of an interpreter and an extra is an environment of its own in a temporary folder: the wheel is installed
there, `pip check` looks for requirements that contradict each other, and the main job runs from an empty directory with
an empty home. Beside the wheel without any extra, the `--help` of each of its commands is asked for too. The
table at the end says what became of each pair; exit code 0 where all of them worked. The extras are those that
the wheel itself names, but for CuPy (it needs a GPU), PyTorch and what development takes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = re.compile(r"cuda.*|peer|dev")
JOB = ("-m", "cupynet", "train", "data=synthetic", "data.train=2000", "epochs=1")
STEP_S = 1200  # of one command: an installation may download some hundred MB
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CUPYNET_DATA")


def interpreters(versions: Sequence[str]) -> dict[str, str]:
    """For each version ("3.11") the interpreter that answers to it, on the path or where pyenv keeps them."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = {}
    for version in versions:
        name = f"python{version}"
        for candidate in [name, *map(str, sorted(kept.glob(f"{version}.*/bin/{name}")))]:
            asked = [candidate, "-c", "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"]
            try:
                answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if answer.stdout.strip() == version:
                found[version] = candidate
                break
    return found


def supported() -> list[str]:
    """The versions of Python that pyproject.toml's classifiers name."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def built(folder: Path) -> Path:
    """The wheel of this working tree, built into the folder."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


def inside(wheel: Path) -> tuple[list[str], list[str]]:
    """(extras, commands) that the wheel promises, but for the extras that are left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(names["METADATA"]).decode()
        scripts = archive.read(names["entry_points.txt"]).decode()
    extras = re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE)
    return [extra for extra in extras if not LEFT_OUT.fullmatch(extra)], re.findall(r"^(cupynet-\S+) *=", scripts, re.M)


def tried(python: str, wheel: Path, extra: str, commands: Sequence[str]) -> str:
    """Install the wheel with the extra into a new environment and use it: "" where all worked, else what failed."""
    with tempfile.TemporaryDirectory(prefix="cupynet-wheel-") as name:
        folder = Path(name)
        empty, home = folder / "empty", folder / "home"
        empty.mkdir()
        home.mkdir()
        own = str(folder / "env" / "bin" / "python")
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        steps = [
            ("venv", [python, "-m", "venv", str(folder / "env")], {}),
            ("install", [own, "-m", "pip", "install", "-q", what], {}),
            ("check", [own, "-m", "pip", "check"], {}),
            ("train", [own, *JOB], {"HOME": str(home)}),
        ]
        steps += [(command, [str(Path(own).with_name(command)), "--help"], {"HOME": str(home)}) for command in commands]
        for step, command, more in steps:
            environment = {key: value for key, value in os.environ.items() if key not in HIDDEN} | more
            try:
                done = subprocess.run(
                    command, cwd=empty, env=environment, capture_output=True, text=True, timeout=STEP_S, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{step}: no end after {STEP_S} s"
            said = done.stdout + done.stderr
            if done.returncode:
                return f"{step}: exit code {done.returncode}\n{said}"
            if step == "train" and "test accuracy" not in said:
                return f"{step}: no accuracy in what it said\n{said}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", action="append", metavar="3.X", help="only this version; may be given several times"
    )
    parser.add_argument("--extra", action="append", help="only this extra; '' is none of them")
    asked = parser.parse_args(arguments)
    wanted = asked.python or supported()
    pythons = interpreters(wanted)
    missing = [version for version in wanted if version not in pythons]
    where = Path(tempfile.mkdtemp(prefix="cupynet-wheels-"))
    try:
        wheel = built(where)
        extras, commands = inside(wheel)
        chosen = asked.extra or ["", *extras]
        if unknown := set(chosen) - {"", *extras}:
            raise SystemExit(f"{wheel.name} has no extra {', '.join(sorted(unknown))}: it has {', '.join(extras)}")
        outcome: dict[tuple[str, str], str] = {}
        for version, python in pythons.items():
            for extra in chosen:
                began = time.monotonic()
                fault = tried(python, wheel, extra, commands if not extra else ())
                outcome[version, extra] = "FAILED" if fault else f"{time.monotonic() - began:.0f} s"
                print(f"Python {version}, {extra or 'no extra'}: {fault or outcome[version, extra]}", flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    print(table(outcome, list(pythons), chosen))
    for version in missing:
        print(f"python{version} was not found, and not tried")
    return 1 if missing or "FAILED" in outcome.values() or not outcome else 0


def table(outcome: dict[tuple[str, str], str], versions: Sequence[str], extras: Sequence[str]) -> str:
    """A row for each version of Python, a column for each extra."""
    rows = [["Python", *(extra or "no extra" for extra in extras)]]
    rows += [[version, *(outcome[version, extra] for extra in extras)] for version in versions]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
