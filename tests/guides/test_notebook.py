"""The notebook runs from top to bottom."""

import json
import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "cupynet" / "guides" / "first_steps.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    shown = json.dumps(done)
    assert shown.count("image/png") >= 2
    assert "text/html" in shown
    assert "1 epoch complete, stopped after iteration" in shown
    assert (tmp_path / "digits.safetensors").is_file()


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
