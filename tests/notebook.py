"""Run the notebook and store it with its outputs: `make notebook`."""

import os
import sys
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
    notebook = stored()
    resources = {"metadata": {"path": str(folder)}}
    options: dict[str, Any] = {"record_timing": False, "coalesce_streams": True, "resources": resources}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", **options).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version
    return notebook


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(Path(folder)), NOTEBOOK)
