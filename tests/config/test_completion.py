"""Completion in a shell, as --help has it: of the console script, which is a file of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_settings_and_files(tmp_path: Path) -> None:
    script = tmp_path / "cupynet"  # what pip makes of the entry in pyproject.toml
    script.write_text(f"#!{sys.executable}\nfrom cupynet.__main__ import main\nmain()\n")
    script.chmod(0o755)
    asked = ("optimizer=nad",)
    tabs = "\n".join(
        f'COMP_LINE="cupynet train {word}" COMP_POINT={14 + len(word)} COMP_CWORD=2\nhydra_bash_completion\n'
        'echo "${COMPREPLY[@]}"'
        for word in asked
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f'eval "$(cupynet train -sc install=bash)"\ncomplete -p cupynet\n{tabs}'],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:/usr/bin:/bin"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    registered, *found = done.stdout.splitlines()
    assert registered.endswith("-F hydra_bash_completion cupynet") and done.returncode == 0
    assert found == ["optimizer=nadam"] and done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["cupynet"]
