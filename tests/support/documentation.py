"""The documentation's pages and their programs."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted(
        [
            *(ROOT / "README.md", ROOT / "conf" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"),
            *(ROOT / "cupynet").rglob("*.md"),
            *(ROOT / "outputs" / "records").glob("*.md"),
        ]
    )
}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = {
    "MNIST()": "Synthetic(train=300, test=100)",
    "import MNIST": "import Synthetic",
    "Synthetic()": "Synthetic(train=300, test=100)",
    "Synthetic(train=2000, test=500)": "Synthetic(train=300, test=100)",
    "epochs=10": "epochs=1",
    "epochs=5": "epochs=1",
    '"numba", seed=123, dtype="double"': '"numpy", seed=123, dtype="double"',  # no test needs these kernels in double
}


def run_guide(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a page's programs, reduced in size and without those for PyTorch, in one module; return its variables."""
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {"__name__": "guide"}
    for kind, code in FENCE.findall(PAGES[page]):
        if kind == "python":
            for long, short in QUICK.items():
                code = code.replace(long, short)
            exec(compile(code, page, "exec"), found)
    return found
