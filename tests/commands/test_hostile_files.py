"""Run folders from strangers with random damage: nothing in them controls the terminal, and no command hangs.

Each case is a copy of a good folder with one change, which commands then read. Every error is a single line with a
documented exit code. A case can be repeated by its number.
"""

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cupynet.runs.checkpoints import _write_manifest
from tests.support import warm
from tests.support.commands import SMALL, environment, run
from tests.support.user_files import digits, write_pictures

CASES, TOGETHER = 200, 10
LIMIT_S = 60
SECRET = "Zq7secret"
# control bytes except newline, C1 controls, bidirectional controls, tracebacks, warnings, and environment variables
FORBIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|Traceback|[a-z]Warning: |" + SECRET
)
CODES = {0, 1, 2, 3, 65, 74}
OF_RUNS = ["data=synthetic", "data.train=200", "data.test=60", "workers=2", *SMALL, "batch_size=32"]

TEXTS = [
    "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://x\x07y", "a\x9b5nb", "\u202egnp.exe", "\u2066x\u2069",
    "\u061cx", "a\rb", "a\bb", "a\tb", "a\x00b", "a\x7fb", "a\nb", "half \ud83d", "<script>alert(1)</script>",
    "${oc.env:HOSTILE}", "${oc.decode:${oc.env:HOSTILE}}", "${cupynet.env:HOSTILE,1}", "${seed}", "$HOSTILE",
    "%(asctime)s {0} {x}", "[bold red]x[/]", "=cmd()", "../../../etc/passwd", "x" * 50_000, "",
]  # fmt: skip
VALUES: list[Any] = [  # that no run has written
    *TEXTS, 0, -1, 1 << 63, 1 << 64, 10**30, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -float("inf"),
    None, True, False, [], {}, [[]], [None], {"a": {}}, [1, "\x1b[2J"], {"\u202ek\x1b": "\x07"},
]  # fmt: skip
KINDS: list[Callable[[Path], object]] = [
    *[os.mkfifo] * 3, Path.mkdir, Path.touch,
    *(partial(Path.symlink_to, target=target) for target in ("/dev/zero", "/proc/self/environ", "nowhere")),
    lambda path: path.symlink_to(path.name),
]  # fmt: skip
STRUCTURED = ("summary.json", "started.json", ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml")
SHOWN = ("dataset", "workers", "test_accuracy", "test_loss", "class_names", "normalize", "image_shape", "commit")


def name(rng: random.Random) -> str:
    """Return a file name, which may not be valid UTF-8."""
    return re.sub("[/\0\ud83d]", "_", rng.choice([*TEXTS, "bad\udcff"]))[:60] or "empty"


def changed(content: Any, rng: random.Random) -> None:
    """Change one value, at any depth, or add a key."""
    parts = content.values() if isinstance(content, dict) else content
    inside = [each for each in parts if isinstance(each, dict | list) and each]
    if inside and rng.random() < 0.7:
        changed(rng.choice(inside), rng)
    elif isinstance(content, dict):
        content[rng.choice([*content, rng.choice(TEXTS)])] = rng.choice(VALUES)
    elif content:
        content[rng.randrange(len(content))] = rng.choice(VALUES)


def change_structure(folder: Path, rng: random.Random) -> None:
    """Change values at any depth of a file, which stays valid JSON or YAML."""
    path = folder / rng.choice(STRUCTURED)
    content: Any = yaml.safe_load(path.read_text()) or []
    if path.name == "overrides.yaml":
        content += [f"seed={rng.choice(TEXTS)}", f"{rng.choice(TEXTS)}=1", "seed=${oc.env:HOSTILE}"]
    elif path.name == "summary.json" and rng.random() < 0.5:  # which commands show or use most
        content[rng.choice(SHOWN)] = rng.choice(VALUES)
    for _ in range(rng.randint(1, 3)):
        changed(content, rng)
    if path.suffix == ".json":
        path.write_text(json.dumps(content, ensure_ascii=rng.random() < 0.5), errors="surrogatepass")
    else:
        path.write_text(yaml.safe_dump(content), errors="replace")


def change_checkpoint(folder: Path, rng: random.Random) -> None:
    path = max((folder / "checkpoints").iterdir())
    content = json.loads((path / "state.json").read_text())
    content["made_by"]["processor"] = rng.choice(TEXTS)
    for _ in range(rng.randint(0, 2)):
        changed(content, rng)
    (path / "manifest.json").unlink()
    (path / "state.json").write_text(json.dumps(content))
    _write_manifest(path)
    if rng.random() < 0.5:  # resumed
        (folder / "summary.json").unlink(missing_ok=True)


def change_bytes(folder: Path, rng: random.Random) -> None:
    """Cut a file off, flip a bit, or insert a text."""
    path = rng.choice([each for each in sorted(folder.rglob("*")) if each.is_file()])
    whole = path.read_bytes() or b"x"
    place = rng.randrange(len(whole))
    flipped = bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
    inserted = rng.choice(TEXTS).encode(errors="replace") + whole[place:]
    path.write_bytes(whole[:place] + rng.choice([b"", flipped, inserted]))


def change_kind(folder: Path, rng: random.Random) -> None:
    """Replace a file or folder by a pipe, a link, a folder or an empty file."""
    path = rng.choice([each for each in sorted(folder.rglob("*")) if each.exists()])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    rng.choice(KINDS)(path)


def change_folder(folder: Path, rng: random.Random) -> None:
    """Add a file or a folder with a hostile name."""
    path = rng.choice([folder, folder, *(each for each in folder.rglob("*") if each.is_dir())]) / name(rng)
    if not path.exists():
        path.touch() if rng.random() < 0.5 else path.mkdir()


Change = Callable[[Path, random.Random], None]
CHANGES: list[Change] = [*[change_structure] * 8, change_checkpoint, change_bytes, change_kind, change_folder]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and pictures."""
    folder = tmp_path_factory.mktemp("good")
    run(folder, *OF_RUNS, "epochs=2", "log_every=1", "hydra.run.dir=run")
    pictures = write_pictures(folder / "digits", digits(60, 20))
    (pictures / "test" / "class-1").rename(folder / "pictures")
    return folder


def case(good: Path, here: Path, rng: random.Random) -> tuple[Change, list[list[str]]]:
    """Return the change that was made and the commands to run."""
    called = f"outputs/{name(rng)}" if rng.random() < 0.3 else "outputs/run"
    folder = Path(shutil.copytree(good / "run", here / called))
    shutil.copytree(good / "pictures", here / "pictures")
    change = rng.choice(CHANGES)
    change(folder, rng)
    commands = rng.sample(
        [
            ["predict", called, "pictures"], ["predict", f"{called}/checkpoints", "pictures", "--json"],
            ["evaluate", called], ["evaluate", called, "--json"], ["report", called],
            ["compare", "outputs", *rng.choice([[], ["--json"], ["--csv", "x.csv"]])],
            ["export", called, "--torch-module", "net.py", "--safetensors", "w.safetensors"],
        ],
        2,
    )  # fmt: skip
    if rng.random() < 0.5:
        commands.append(["train", *rng.choice([[f"resume={called}"], ["resume=latest", *OF_RUNS]]), "epochs=3"])
    return change, commands


def faults_of(number: int, good: Path, here: Path) -> list[str]:
    """Return a case's forbidden output and exit codes, or hang."""
    rng = random.Random(number)
    change, commands = case(good, here, rng)
    variables = environment(HOSTILE=SECRET, CUPYNET_REPORT=rng.choice(["true", "false"]))
    found = []
    for words in commands:
        label = f"{number}: {change.__name__}: {words}"
        try:
            done = warm.command("cupynet", words, here, variables, LIMIT_S)
        except subprocess.TimeoutExpired:
            return [f"{label}: hangs"]
        pages = [page.read_bytes().decode(errors="replace") for page in here.rglob("*.html") if page.is_file()]
        if done.returncode not in CODES:
            found.append(f"{label}: {done}")
        for text in (done.stdout, done.stderr, *pages):
            if forbidden := FORBIDDEN.search(text):
                found.append(f"{label}: {forbidden[0]!r} in {text[max(forbidden.start() - 80, 0) :][:300]!r}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, TOGETHER))
def test_hostile_files_control_no_terminal_and_end_every_command(first: int, good: Path, tmp_path: Path) -> None:
    faults = []
    for number in range(first, first + TOGETHER):
        (tmp_path / str(number)).mkdir()
        faults += faults_of(number, good, tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
    assert not faults, "\n\n".join(faults)
