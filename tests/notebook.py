"""Run the notebook and store it with its outputs: `make notebook`."""

import os
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "cupynet" / "guides" / "first_steps.ipynb"


def stored() -> Any:
    return nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)


def executed(folder: Path) -> Any:
    """Return the notebook with new outputs. `folder` is the working directory of its kernel."""
    notebook, resources = stored(), {"metadata": {"path": str(folder)}}
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # the width of lines and the backend must not depend on this machine
    environment = {**os.environ, "PYTHONPATH": python, "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    options: dict[str, Any] = {"record_timing": False, "coalesce_streams": True, "resources": resources}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", **options).execute(env=environment)
    notebook.metadata.language_info = {"name": "python"}  # without the version
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(Path(folder)), NOTEBOOK)
