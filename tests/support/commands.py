"""Run a command as a user would: in its own process and folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import warm

# types of fixtures: `command` and `error_line` in tests/config, `call` in tests/commands
Command = Callable[..., Any]
Line = Callable[[], str]
Call = Callable[..., "Called"]

ROOT = Path(__file__).resolve().parents[2]

QUICK = ["data=synthetic", "data.train=600", "data.test=200", "epochs=1", "batch_size=32"]
QUICK += ["callbacks.progress.style=lines"]
SMALL = ["model.layers.conv1.filters=4", "model.layers.conv2.filters=6", "model.layers.dense1.units=16"]


class Called(NamedTuple):
    """The outcome of a command in this process: its exit code and output."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error message: the only line on stderr."""
        assert self.err.startswith("cupynet: ") and self.err.count("\n") == 1, self.err
        return self.err


def environment(**more: str) -> dict[str, str]:
    hidden = {"CUPYNET_DATA", "BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU", "HYDRA_FULL_ERROR"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PYTHONPATH": str(ROOT), "CUPYNET_OFFLINE": "1", "COLUMNS": "200", **more}


def run(folder: Path, *arguments: str, command: str = "train", code: int = 0, **more: str) -> tuple[str, str]:
    """Run a command in `folder` and return its stdout and stderr. Fail if its exit code is not `code`."""
    done = warm.command("cupynet", (command, *arguments), folder, environment(**more), 300, **more)
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def run_folder(folder: Path) -> Path:
    (summary,) = folder.glob("outputs/**/.hydra")
    return summary.parent


def summary_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a run's summary after making some changes in its file."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text()) | changes
    if changes:
        path.write_text(json.dumps(found))
    return found
