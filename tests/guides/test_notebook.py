"""The notebook runs from top to bottom, and its stored outputs are up to date except for numbers."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("nbformat")

from tests import notebook


def described(output: Any) -> object:
    """Return the types of an output, and its text without numbers."""
    data = output.get("data", {})
    text = output.get("text", data.get("text/plain", ""))
    return output.output_type, sorted(data), re.sub(r"[\d.,]+|\s+", " ", text).split()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_cell_of_the_notebook_runs_and_its_stored_outputs_are_up_to_date(tmp_path: Path) -> None:
    for old, new in zip(notebook.stored().cells, notebook.executed(tmp_path).cells, strict=True):
        expected, found = ([described(output) for output in cell.get("outputs", ())] for cell in (old, new))
        assert found == expected
    assert (tmp_path / "digits.safetensors").is_file()
