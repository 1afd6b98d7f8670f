"""--help and other questions to a command, and completion in bash."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cupynet import config
from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings, own_names
from cupynet.core.version import __version__
from tests.support.commands import ROOT, Command, environment
from tests.support.settings import CHOICES, CONF, GROUPS


def test_info_cfg_and_version_print_an_answer_and_write_nothing(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"--info defaults": "spine", "-c job -p optimizer": "momentum: 0.9", "--version": __version__}
    for arguments, answer in answers.items():
        assert command(*arguments.split()) == (0, [])
        out, err = capsys.readouterr()
        assert answer in out and err == "" and list(in_folder.iterdir()) == []


SCHEMAS = {"bench": BenchSettings, "plan": PlanSettings, "find_rate": RateSettings, "tune": TuneSettings}


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(("name", "schema"), [("config", Settings), ("tune", TuneSettings)])
def test_help_lists_the_groups_the_settings_of_the_command_and_the_exit_codes(
    name: str, schema: type[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page lists each group's files (or some and `...`), the command's own settings, and the exit codes."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    config.run(lambda settings, folder: None, lambda settings: settings, name, schema)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert name == "config" or all(setting in page for setting in own_names(schema))
    groups = {words[0]: words for words in map(str.split, page.splitlines()) if words and words[0] in GROUPS}
    assert list(groups) == list(GROUPS)
    for group, words in groups.items():
        there = {file for its, file in CHOICES if its == group}
        assert there <= {*words} or (there & {*words} and words[-1] == "...")
    (codes,) = [line for line in page.splitlines() if line.startswith("Exit codes")]
    assert re.findall(r"\d+", codes) == ["0", "1", "2", "3", "65", "74", "130", "143"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_help_of_every_command_lists_its_own_settings(name: str) -> None:
    header = yaml.safe_load((CONF / f"{name}.yaml").read_text())["hydra"]["help"]["header"]
    lines = header.replace("${hydra.job.name}", name).splitlines()
    assert max(map(len, lines)) <= 80 and all(setting in header for setting in own_names(SCHEMAS[name]))


SCRIPT = """
import sys
from cupynet.config import run
from cupynet.config.schema import Settings

try:
    run(lambda settings, folder: None, lambda settings: settings, "config", Settings)
finally:
    assert "numpy" not in sys.modules and "numba" not in sys.modules
"""


def test_help_imports_no_numpy_and_ends_quietly_on_a_broken_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-W", "error", "-c", SCRIPT, "--help"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open(writer, "w") as stdout:
        done = subprocess.run(line, cwd=tmp_path, env=variables, stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


ASKED = """
eval "$(cupynet train -sc install=bash)"
complete -p cupynet
COMP_LINE="cupynet train optimizer=nad" COMP_POINT=27 COMP_CWORD=2
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_settings_and_files(tmp_path: Path) -> None:
    script = tmp_path / "cupynet"  # like the script that pip installs
    script.write_text(f"#!{sys.executable}\nfrom cupynet.__main__ import main\nmain()\n")
    script.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    line = ["bash", "--norc", "-c", ASKED]
    done = subprocess.run(line, cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True, timeout=120)
    registered, found = done.stdout.splitlines()
    assert registered.endswith("-F hydra_bash_completion cupynet") and found == "optimizer=nadam"
    assert (done.returncode, done.stderr) == (0, "")
    assert [each.name for each in tmp_path.iterdir()] == ["cupynet"]
