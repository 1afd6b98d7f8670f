"""Names of the files of runs, sweeps and searches. This module does not import NumPy, to keep --help fast."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupynet.core.errors import ConfigError

# settings, command-line overrides, and Hydra's own settings
SETTINGS, OVERRIDES, HYDRA = ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml"
MODEL = "model.safetensors"  # written only by `ParallelWrapper(run=...)`, not by commands
IDENTITY = "cupynet_run.json"  # identifies the training run of a `ParallelWrapper` that the folder belongs to
START = "started.json"  # written at the beginning of a run
SUMMARY = "summary.json"  # written at the end of a run
RESULTS = ("weights.safetensors", "history.jsonl", "examples.safetensors", "report.html", "curves.png")
REOPENED = "unfinished.txt"  # marks a resumed run that has not ended
FAILED = "failed.json"  # error and exit code of a failed run
PROFILE, TRACE = "profile.json", "trace.json"  # written with profile=true
CHECKPOINTS = "checkpoints"
SWEEP, SWEEP_TABLE = "multirun.yaml", "sweep.csv"  # in the folder of a sweep
STUDY, TRIALS = "study.db", "trials"  # in the folder of a search
# folder of a checkpoint; interrupted saves leave folders with a suffix
STEP = re.compile(r"step-(\d{8,})(?:\.(tmp|old)-\d+)?")


def check_outputs(*files: str | Path | None) -> None:
    """Raise ConfigError if a command would write a file twice, or overwrite a file of a run, a sweep or a search."""
    paths = [Path(os.path.realpath(file)) for file in files if file]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path}: would be written twice. Use a different file for each option")
        if os.path.isfile(path) and _is_of_run(path):  # isfile returns False for invalid names
            raise ConfigError(f"{path}: is a file of the run or sweep in this folder. Choose another file name")


def _is_of_run(file: Path) -> bool:
    folder, own = file.parent, (START, SUMMARY, *RESULTS, MODEL, IDENTITY, "train.log", SWEEP, SWEEP_TABLE, STUDY)
    marks = (SETTINGS, START, SUMMARY, IDENTITY, SWEEP, STUDY)
    marked = file.name in own and any((folder / name).is_file() for name in marks)
    return marked or folder.name == Path(SETTINGS).parent.name or STEP.fullmatch(folder.name) is not None


def runs_inside(folder: Path) -> str:
    """Return a hint to use a run of the sweep or search in this folder, or "" if it contains neither."""
    if not any(os.path.isfile(folder / name) for name in (SWEEP, STUDY)):  # isfile returns False for invalid names
        return ""
    first = min(folder.glob(f"*/**/{SETTINGS}"), default=None)  # not the settings of the search itself
    example = "" if first is None else f", such as {first.parents[1]}"
    return f"{folder} contains a sweep or a search. Use one of its runs{example}"


def is_outdated(folder: Path, summary: Mapping[str, Any], iteration: int) -> bool:
    """Return True if a run was resumed after its summary was written, and has not ended since.

    iteration: the last iteration in the history or checkpoints of the run. Needed for runs of earlier
        versions, which did not mark resumed runs.
    """
    return (folder / REOPENED).is_file() or iteration > int(summary.get("iterations", sys.maxsize))


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint for iteration `step`."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by iteration, including `step-....old-...` if it is the only one left."""
    result: dict[int, Path] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(entry.name)
        if match and match[2] != "tmp" and (match[2] is None or int(match[1]) not in result):
            result[int(match[1])] = entry
    return result
