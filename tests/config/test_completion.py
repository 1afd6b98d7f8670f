"""Completion in a shell, as --help describes it: of the console script, which is a file of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment

ASKED = """
eval "$(cupynet train -sc install=bash)"
complete -p cupynet
COMP_LINE="cupynet train optimizer=nad" COMP_POINT=27 COMP_CWORD=2
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_settings_and_files(tmp_path: Path) -> None:
    script = tmp_path / "cupynet"  # what pip makes of the entry in pyproject.toml
    script.write_text(f"#!{sys.executable}\nfrom cupynet.__main__ import main\nmain()\n")
    script.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    line = ["bash", "--norc", "-c", ASKED]
    done = subprocess.run(line, cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True, timeout=120)
    registered, found = done.stdout.splitlines()
    assert registered.endswith("-F hydra_bash_completion cupynet") and found == "optimizer=nadam"
    assert (done.returncode, done.stderr) == (0, "")
    assert [each.name for each in tmp_path.iterdir()] == ["cupynet"]
