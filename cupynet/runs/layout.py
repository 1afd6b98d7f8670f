"""Names in the folders of runs, sweeps and searches. Imports no NumPy, so that --help does not."""

from __future__ import annotations

import re
from pathlib import Path

# settings, overrides as typed, and Hydra's own settings
SETTINGS, OVERRIDES, HYDRA = ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml"
SUMMARY = "summary.json"  # of a run that has ended
TRIAL = "FAST_DEV_RUN.txt"  # marks the results of a fast dev run
REOPENED = "unfinished.txt"  # marks a resumed run that has not ended
FAILED = "failed.json"  # the exit code of a run that an error ended
CHECKPOINTS = "checkpoints"
SWEEP, STUDY = "multirun.yaml", "study.db"  # in the folder of a sweep, and of a search
STEP = re.compile(r"step-(\d{8,})(?:\.(tmp|old)-\d+)?")  # a checkpoint; leftovers of killed saves have a suffix


def step_name(step: int) -> str:
    """Return the name of the checkpoint after iteration `step`."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by iteration: `step-...`, or `.old-...` if a save was killed meanwhile."""
    found: dict[int, Path] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(entry.name)
        if match and match[2] != "tmp" and (match[2] is None or int(match[1]) not in found):
            found[int(match[1])] = entry
    return found
