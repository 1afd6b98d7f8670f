"""Nothing that comes in a file runs, is trusted, or writes where nobody asked it to: a corpus of hostile ones.

Each is refused in one line that names it. A canary lies where its code would have left something, and the folder is
compared with what it was. The tables of those files make the file long.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cupynet import config
from cupynet.commands.tune.command import for_hydra
from cupynet.config import composing, hydra_main, resume, stored
from cupynet.config.experiment import Experiment
from cupynet.config.instantiate import build
from cupynet.config.load_model import Trained
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError, CupynetError, DataError, OutputError
from cupynet.core.files import load_weights, write_output
from cupynet.data import Loader
from cupynet.data.sources.image_folder import Folder
from cupynet.reporting.folder import read_run
from cupynet.runs.checkpoints import Checkpoints, _write_manifest, read
from cupynet.training import History, ParallelWrapper
from tests.support.commands import Command
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model

CANARY = "CANARY"  # what each of them would make in the folder where the command was started
CODE = f"_target_: os.mkdir\npath: {CANARY}"


def tree(folder: Path) -> dict[str, int]:
    """Everything below a folder; of files the time they were written. (A lock comes and goes in a run's folder.)"""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: 0 if path.is_dir() else path.lstat().st_mtime_ns for name, path in found.items()}


def indented(text: str, by: int) -> str:
    return "".join(f"{' ' * by}{line}\n" for line in text.splitlines())


@pytest.fixture
def refused(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refused(said, *arguments): the command says that, in one line, with exit code `code`, and leaves nothing."""

    def call(said: str, *arguments: str, code: int = 2, check: Callable[[Settings], Any] = Experiment) -> None:
        capsys.readouterr()
        before = tree(in_folder)
        assert command(*arguments, check=check) == (code, [])
        stderr = capsys.readouterr().err
        assert said in stderr and stderr.count("\n") == 1 and stderr.startswith("cupynet: "), stderr
        assert tree(in_folder) == before and not (in_folder / CANARY).exists()

    return call


# what a file of settings says -----------------------------------------------------------------------------------------

PARTS = {
    "a borrowed name": (
        "optimizer:\n  _target_: cupynet.commands.train.signal.Signals\n",
        "optimizer._target_=cupynet.commands.train.signal.Signals",
    ),
    "a borrowed function": (
        "loss:\n  _target_: cupynet.commands.train.os.mkdir\n  path: CANARY\n",
        "loss._target_=cupynet.commands.train.os.mkdir",
    ),
    "in a list in a part": (
        "callbacks:\n  a:\n    _target_: cupynet.training.History\n    path:\n      - x:\n" + indented(CODE, 10),
        "callbacks.a.path[0].x._target_=os.mkdir",
    ),
    "threads": (
        "optimizer:\n  _target_: cupynet.parallel.ThreadLauncher\n  workers: 9999\n",
        "is a class of cupynet.parallel.launchers.threads, which is not trusted",
    ),
    "eval": ("loss:\n  _target_: builtins.eval\n", "loss._target_=builtins.eval"),
    "a process": ("loss:\n  _target_: subprocess.Popen\n  args: [mkdir, CANARY]\n", "loss._target_=subprocess.Popen"),
    "half built": ("optimizer:\n  _partial_: true\n", "optimizer._partial_: Nesterov has no argument '_partial_'"),
    "not recursive": (
        "optimizer:\n  _recursive_: false\n",
        "optimizer._recursive_: Nesterov has no argument '_recursive_'",
    ),
    "arguments by place": ("optimizer:\n  _args_: [1]\n", "optimizer._args_: Nesterov has no argument '_args_'"),
}
FILES = {
    "a part": ("optimizer:\n" + indented(CODE, 2), "optimizer._target_=os.mkdir: only classes of cupynet are built"),
    "by a reference": ('loss: "${oc.create:{_target_: os.mkdir, path: CANARY}}"\n', "loss._target_=os.mkdir"),
    "by the environment": ("loss:\n  _target_: ${oc.env:EVIL}\n", "loss._target_=os.mkdir"),
    "a tag": ("loss: !!python/object/apply:os.mkdir [CANARY]\n", "could not determine a constructor for the tag"),
}


@pytest.mark.parametrize("name", PARTS)
def test_settings_build_nothing_untrusted(name: str, in_folder: Path) -> None:
    text, said = PARTS[name]
    settings = settings_of()
    ((group, part),) = yaml.safe_load(text).items()
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Experiment(replace(settings, **{group: {**getattr(settings, group), **part}}))
    assert "\n" not in str(caught.value) and list(in_folder.iterdir()) == []


@pytest.fixture
def untrusted_config(in_folder: Path, minimal_conf: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes its argument to experiment/evil.yaml and returns the folder for --config-dir."""
    monkeypatch.setattr(composing, "conf_folder", hydra_main.conf_folder)  # for `config.compose` too

    def write(text: str) -> Path:
        (in_folder / "theirs" / "experiment").mkdir(parents=True)
        (in_folder / "theirs" / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}")
        return Path("theirs")

    return write


@pytest.mark.parametrize("name", ["a part", "a tag"])
def test_a_config_file_runs_no_code(name: str, refused: Any, untrusted_config: Callable[[str], Path]) -> None:
    text, said = FILES[name]
    untrusted_config(text)
    refused(
        said,
        "--config-dir",
        "theirs",
        "+experiment=evil",
        check=lambda settings: build(settings.optimizer, "optimizer"),
    )


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("a part", "a tag")])
def test_an_interpolation_in_a_config_file_runs_no_code(
    name: str, untrusted_config: Callable[[str], Path], in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = FILES[name]
    monkeypatch.setenv("EVIL", "os.mkdir")
    folder = untrusted_config(text)
    before = tree(in_folder)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        build(config.compose(["+experiment=evil"], folder).loss, "loss")
    assert "\n" not in str(caught.value) and tree(in_folder) == before


# what a run has stored ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("minimal_conf")
def test_a_stored_run_does_not_decide_where_data_are_downloaded(
    command: Command, in_folder: Path, refused: Any
) -> None:
    stored.keep(in_folder / "run", settings_of("data.folder=elsewhere"), ["data.folder=elsewhere"])
    (in_folder / "run" / "summary.json").touch()
    refused("data.folder=elsewhere: ", "resume=run")
    with pytest.raises(ConfigError, match="data.folder=elsewhere: "):
        Trained("run").settings()
    typed = ["data.folder=elsewhere"]
    assert command("resume=run", *typed)[0] == 0 and Trained("run").settings(typed).data["folder"] == "elsewhere"
    assert not (in_folder / "elsewhere").exists()


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join(['*' + m] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)
)
STORED = {
    "an alias": (LAUGHS, "YAML aliases are refused"),
    "deep": ("a: " + "[" * 100_000, "cannot be read"),
    "NUL": ('loss:\n  _target_: "a\\0b"\n', "a NUL character"),
    "long": (f"a: {'x' * (1 << 20)}\n", "1048576 bytes"),
    "the environment": ("seed: ${oc.env:HOME}\n", "must be a plain value"),
    "a part of a value": ("data:\n  folder: x${seed}\nseed: 1\n", "must be a plain value"),
    "a reference to itself": ("seed: ${seed}\n", "must be a plain value"),
    "a reference to nothing": ("seed: ${sed}\n", "must be a plain value"),
    "a class by a resolver": ("loss: '${oc.create:{_target_: os.mkdir}}'\n", "must be a plain value"),
    "a number without end": ("seed: 0x" + "f" * 80_000 + "\n", "cannot be read"),
    "a default without end": (f"seed: ${{cupynet.env:X,{'9' * 8000}}}\n", "must be a plain value"),
    "a tag": ("loss: !!python/object/apply:os.mkdir [CANARY]\n", "could not determine a constructor"),
    "a key twice": ("seed: 1\nseed: 2\n", "found duplicate key seed"),
    "no text": ("\0", "cannot be read"),
    "no mapping": ("- 1\n", "is not a configuration"),
    "Hydra's own": ("hydra:\n  run: {dir: CANARY}\n", "'hydra'"),
}


NAMES = ("it's a\\b=c,é{x}[1]#~$x", "a b", "a\\b", "a\\'b", "a\\", "a=b,c", "{x}", "[1]", "#~+@", "$x", "é")


@pytest.fixture
def run(in_folder: Path, minimal_conf: None) -> Path:
    """The folder of a run with two workers that has stored its settings."""
    stored.keep(in_folder / "run", settings_of("workers=2"), ["hydra.run.dir=run", "workers=2"])
    (in_folder / "run" / "train.log").touch()
    return in_folder / "run"


@pytest.mark.parametrize("name", STORED)
def test_the_stored_settings_of_a_run(name: str, run: Path) -> None:
    text, said = STORED[name]
    path = run / ".hydra" / "config.yaml"
    path.write_text(text)
    with pytest.raises((DataError, ConfigError)) as caught:
        config.load(run)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value) and "\n" not in str(caught.value)


def test_an_evaluated_run_builds_no_untrusted_class(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = run / ".hydra" / "config.yaml", (run / ".hydra" / "config.yaml").read_text()
    before = tree(run.parent)
    for part, said in {
        "loss:\n  _target_: os.mkdir\n  path: CANARY\n": "loss._target_=os.mkdir: only classes of cupynet are built",
        'loss: "${oc.create:{_target_: os.mkdir, path: CANARY}}"\n': "must be a plain value",
        "loss:\n  _target_: subprocess.Popen\n  args: [mkdir, CANARY]\n": "loss._target_=subprocess.Popen",
    }.items():
        changed = re.sub(r"^loss:\n(  .*\n)+", lambda _, part=part: part, text, flags=re.MULTILINE)
        assert changed != text
        path.write_text(changed.replace("trusted_modules: []", "trusted_modules: [os, subprocess, posix]"))
        with pytest.raises((ConfigError, DataError)) as caught:
            Experiment(config.load(run))
        assert said in str(caught.value)
    assert tree(run.parent).keys() == before.keys()


def test_stored_numbers_are_limited_for_all_who_read_them(run: Path) -> None:
    (run / ".hydra" / "config.yaml").write_text(f"seed: [0x{'f' * 80_000}]\n")
    with pytest.raises(DataError, match="cannot be read"):
        config.written(run)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["experiment=../../theirs/evil"],
            "experiment=../../theirs/evil: is not a setting of a run",
        ),
        (["experiment=[../../theirs/evil]"], "is not a setting of a run"),
        (["+callbacks@hydra.callbacks=default"], "+callbacks@hydra.callbacks=default: is not a setting"),
        (["nothing=1"], "nothing=1: is not a setting"),
        (["--config-dir=theirs"], "--config-dir=theirs: is not"),
        (["data=a.b"], "is not a setting of a run"),
        ([{"a": 1}], "is not a setting of a run"),
        ("seed: 1\n", "is not a setting of a run"),
        ("[", "cannot be read"),
    ],
)
def test_the_stored_command_line_of_a_run(overrides: Any, said: str, run: Path) -> None:
    text = overrides if isinstance(overrides, str) else json.dumps(overrides)
    (run / ".hydra" / "overrides.yaml").write_text(text)
    with pytest.raises(DataError, match="overrides.yaml: ") as caught:
        config.overrides_of(run)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_resumed_run_writes_nowhere_else(run: Path, refused: Any) -> None:
    path = run / ".hydra" / "config.yaml"
    old, new = "cupynet.training.History\n    path: null", "cupynet.training.History\n    path: /CANARY"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refused("callbacks.history.path=/CANARY: the run in run would write", "resume=run")


@pytest.mark.parametrize("path", ["/CANARY", "run/../CANARY", "elsewhere/history.jsonl", "run"])
def test_a_stored_callback_writes_nowhere_but_into_the_folder_of_its_run(path: str) -> None:
    parts = {"history": {"_target_": "cupynet.training.History", "path": path}}
    with pytest.raises(ConfigError, match=f"^callbacks.history.path={path}: the run in run would write"):
        stored.check_outputs(parts, Path("run"), ["epochs=3"])
    stored.check_outputs(parts, Path("run"), [f"callbacks.history.path={path}"])  # who types it may
    parts["history"]["path"] = "run/history.jsonl"
    stored.check_outputs(parts, Path("run"), [])


def test_a_resumed_run_does_not_follow_its_stored_command_line(run: Path, command: Command) -> None:
    evil = ["trusted_modules=[os]", "++trusted_modules=[os]", "hydra.run.dir=CANARY", "hydra/launcher=evil"]
    evil += ["hydra.callbacks.evil._target_=os.mkdir", "hydra.callbacks.evil.path=CANARY"]
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(["workers=2", *evil]))
    (run / ".hydra" / "hydra.yaml").write_text("hydra:\n  run: {dir: CANARY}\n  callbacks: {a: {_target_: os.mkdir}}\n")
    config_file = run / ".hydra" / "config.yaml"
    config_file.write_text(config_file.read_text().replace("trusted_modules: []", "trusted_modules: [os]"))
    code, (settings,) = command("resume=run")
    assert code == 0 and settings.trusted_modules == [] and settings.workers == 2
    assert not (run.parent / CANARY).exists()


def test_links_in_the_folder_of_a_run(run: Path, refused: Any) -> None:
    victim = run.parent / "victim"
    victim.write_text("precious")
    for name in ("history.jsonl", "train.log", ".hydra/overrides.yaml", "running.json", "tensorboard"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
        refused("must be a plain file", "resume=run", code=65)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    assert victim.read_text() == "precious"


# links below the folder of a run --------------------------------------------------------------------------------------

FOLDERS = ("sub", "sub/deep", "checkpoints", "checkpoints/step-00000001", "tensorboard", ".hydra/more", "wandb/run-1")
LEADING_OUT: dict[str, Callable[[Path, Path], None]] = {
    "to a folder": lambda link, victim: link.symlink_to(victim),
    "to a folder, relative": lambda link, victim: link.symlink_to(os.path.relpath(victim, link.parent)),
    "to a file": lambda link, victim: link.symlink_to(victim / "notes.jsonl"),
    "to nothing yet": lambda link, victim: link.symlink_to(victim / "new"),
    "over another link": lambda link, victim: (
        (link.parent / "other").symlink_to(victim),
        link.symlink_to("other"),
    ),
    "a hard link": lambda link, victim: os.link(victim / "notes.jsonl", link),
    "a pipe": lambda link, victim: os.mkfifo(link),
}
WRITERS = ("History", "Checkpoint", "TensorBoard", "WandB", "Profile")


@pytest.fixture
def victim(run: Path) -> Path:
    """A folder outside the run's, whose content must not change."""
    folder = run.parent / "victim"
    (folder / "checkpoints" / "step-00000111").mkdir(parents=True)
    (folder / "notes.jsonl").write_text("precious")
    return folder


@pytest.mark.parametrize("kind", LEADING_OUT)
@pytest.mark.parametrize("place", FOLDERS)
def test_a_link_below_the_folder_of_a_run_leads_nowhere(place: str, kind: str, run: Path, victim: Path) -> None:
    """One or two levels down; both by itself and in a stored path."""
    (run / place).mkdir(parents=True)
    link = run / place / "link"
    LEADING_OUT[kind](link, victim)
    before = tree(victim)
    with pytest.raises(DataError, match="must be a plain file"):
        resume.find("run", [])
    if kind not in ("a hard link", "a pipe"):
        for name in WRITERS:
            for path in (link, link / "new"):
                parts = {"a": {"_target_": f"cupynet.training.{name}", "path": str(path)}}
                with pytest.raises(ConfigError, match=r"^callbacks\.a\.path="):
                    stored.check_outputs(parts, run, [])
    assert tree(victim) == before


def test_a_hostile_run_is_refused_by_the_command(run: Path, victim: Path, refused: Any) -> None:
    (run / "sub").mkdir()
    (run / "sub" / "link").symlink_to(victim)
    path = run / ".hydra" / "config.yaml"
    old, new = (
        "cupynet.training.History\n    path: null",
        "cupynet.training.History\n    path: run/sub/link/notes.jsonl",
    )
    path.write_text(path.read_text().replace(old, new))
    refused("run/sub/link: must be a plain file", "resume=run", code=65)


def test_links_that_stay_in_the_folder_of_a_run_are_followed(run: Path, victim: Path) -> None:
    """Those of W&B, too: one leads to its cache, and uploaded files are links to where the run was at that time."""
    logs = run / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to(logs.parent.name)
    (logs / "debug-core.log").symlink_to(victim / "notes.jsonl")
    (logs / "circle").symlink_to("circle")
    assert resume.find("run", []) == Path("run")
    parts = {"a": {"_target_": "cupynet.training.TensorBoard", "path": "run/wandb/latest-run/events"}}
    stored.check_outputs(parts, Path("run"), [])
    (logs / "folder").symlink_to(victim)
    with pytest.raises(DataError, match="folder: must be a plain file"):
        resume.find("run", [])


def test_a_fast_dev_run_with_links_is_not_overwritten(run: Path, victim: Path, refused: Any) -> None:
    (run / "FAST_DEV_RUN.txt").touch()
    (run / "checkpoints").symlink_to(victim / "checkpoints")  # where a new run removes the old checkpoints
    refused("checkpoints: must be a plain file", "hydra.run.dir=run", code=65, check=lambda settings: None)


@pytest.mark.parametrize(
    "path",
    [
        *("..", "../x", "run", "run/.", "run/..", "run/../victim/x", "run/sub/../../victim", "./run/../run/../victim"),
        *("victim/x", "/CANARY", "runs/x", "run2/x", "~/x"),
    ],
)
@pytest.mark.parametrize("name", WRITERS)
def test_a_stored_path_stays_in_the_folder(path: str, name: str, run: Path, victim: Path) -> None:
    parts = {"a": {"_target_": f"cupynet.training.{name}", "path": path}}
    with pytest.raises(ConfigError, match=r"^callbacks\.a\.path="):
        stored.check_outputs(parts, Path("run"), [])


@pytest.mark.parametrize("path", ["run/x", "run/a/../x", "run/../run/x", "./run/x/y", "ABSOLUTE"])
def test_a_stored_path_inside_the_folder_is_kept(path: str, run: Path) -> None:
    path = path.replace("ABSOLUTE", str(run / "x"))
    parts = {"a": {"_target_": "cupynet.training.History", "path": path}}
    for folder in (Path("run"), run):
        stored.check_outputs(parts, folder, [])


MLFLOW = [
    "cupynet.training.MLflow",
    "cupynet.training.callbacks.loggers.MLflow",
    "cupynet.training.callbacks.loggers.mlflow.MLflow",
]


@pytest.mark.parametrize("uri", [{}, {"uri": None}, {"uri": "sqlite:///run/mlflow.db"}, {"uri": "http://localhost"}])
@pytest.mark.parametrize("target", MLFLOW)
def test_a_stored_run_does_not_decide_where_mlflow_writes(target: str, uri: Any) -> None:
    parts = {"m": {"_target_": target, **uri}}
    for typed in (
        [],
        ["epochs=2"],
        ["callbacks.m={artifacts: true}"],
        ["callbacks={m: {name: a}}"],
        ["callbacks.m2.uri=x"],
    ):
        with pytest.raises(ConfigError, match=r"^callbacks\.m\.uri="):
            stored.check_outputs(parts, Path("run"), typed)
    for typed in (
        ["callbacks.m.uri=null"],
        ["+callbacks.m={uri: x}"],
        ["callbacks={m: {uri: x}}"],
        ["callbacks=mlflow"],
    ):
        stored.check_outputs(parts, Path("run"), typed)


def test_a_resumed_run_does_not_write_to_mlflow(run: Path, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{CANARY}")
    path = run / ".hydra" / "config.yaml"
    part = "callbacks:\n  m:\n    _target_: cupynet.training.MLflow\n"
    path.write_text(path.read_text().replace("callbacks:\n", part))
    refused("callbacks.m.uri=null: the run in run would write", "resume=run")


def test_changing_a_part_does_not_permit_its_stored_places(run: Path) -> None:
    parts = {"a": {"_target_": "cupynet.training.WandB", "mode": "online", "path": "/CANARY"}}
    for typed in (["callbacks.a={project: x}"], ["callbacks.a={mode: offline}"], ["callbacks.a.project=x"]):
        with pytest.raises(ConfigError, match=r"^callbacks\.a\."):
            stored.check_outputs(parts, run, typed)
    stored.check_outputs(parts, run, ["callbacks.a={mode: online, path: /CANARY}"])


def test_a_folder_name_is_not_interpolated(run: Path, refused: Any) -> None:
    shutil.move(run, run.parent / "${oc.env:HOME}")
    refused("${oc.env:HOME}: must not have ${ in its name", "resume=${oc.env:HOME}", code=65)


@pytest.mark.parametrize("name", ["history.jsonl", "train.log", "running.json", "report.html"])
def test_pipes_in_the_folder_of_a_run(name: str, run: Path, refused: Any) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    refused(f"{name}: must be a plain file", "resume=run", code=65)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_is_found_and_quoted(name: str, run: Path) -> None:
    shutil.move(run, run.parent / name)
    quoted = resume.quoted(Path(name))
    for typed in (name, f"'{name}'"):
        assert resume.find(str(resume.asked([f"resume={typed}"])), []) == Path(name)
    given: Any = OverridesParser.create().parse_override(f"hydra.run.dir={quoted}").value()
    assert OmegaConf.create({"dir": given}).dir == name


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_run_resumes_in_a_folder_of_any_name(name: str, run: Path, command: Command) -> None:
    shutil.move(run, run.parent / name)
    assert command(f"resume={name}")[0] == 0
    assert sorted(path.name for path in run.parent.iterdir()) == [name]
    assert (run.parent / name / ".hydra" / "overrides.yaml").is_file()


# files of numbers -----------------------------------------------------------------------------------------------------


def header(entries: Any, size: int | None = None, body: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("../CANARY")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    else:
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("../CANARY", b"x")
    return buffer.getvalue()


def objects() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([Evil()], dtype=object))
    return buffer.getvalue()


SHA = {"__metadata__": {"sha256": "0" * 64}}
WEIGHTS = {
    "a header of 2^60 bytes": header({}, 1 << 60),
    "a header of 2^63 - 1 bytes": header({}, (1 << 63) - 1),
    "overlapping": header(
        SHA | {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}, body=bytes(8)
    ),
    "a negative shape": header(SHA | {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, body=bytes(8)),
    "a huge shape": header(
        SHA | {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, body=bytes(8)
    ),
    "offsets beyond the file": header(
        SHA | {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 50]}}, body=bytes(8)
    ),
    "an unknown dtype": header(SHA | {"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}}, body=bytes(8)),
    "one NumPy does not have": header(
        SHA | {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, body=bytes(8)
    ),
    "another dtype than its bytes": header(
        SHA | {"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}, body=bytes(8)
    ),
    "deep": header(b"[" * 100_000),
    "a pickle": pickle.dumps(Evil()),
    "npz with objects": objects(),
    "a gzip bomb": gzip.compress(bytes(1 << 24)),
    "tar": archive("tar"),
    "zip": archive("zip"),
    "nothing": b"",
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weight_files_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, and in a checkpoint whose digests are right."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(WEIGHTS[name])
    with pytest.raises(DataError, match=r"w\.safetensors: ") as caught:
        load_weights(tmp_path / "w.safetensors")
    assert "\n" not in str(caught.value)
    path = Checkpoints(tmp_path / "c").save(1, {"workers": []}, {"weights": {}})
    (path / "manifest.json").unlink()
    (path / "weights.safetensors").write_bytes(WEIGHTS[name])
    _write_manifest(path)
    with pytest.raises(DataError, match=r"weights\.safetensors: "):
        read(path)
    assert not (tmp_path / CANARY).exists() and not (tmp_path.parent / CANARY).exists()


@pytest.mark.parametrize(
    "name", ["run.tar", "run.zip", "a\0b", "a" * 5000, "../nothing", "/nothing", "run/checkpoints/step-1/../.."]
)
def test_a_folder_without_a_run_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for kind in ("tar", "zip"):
        (here / f"run.{kind}").write_bytes(archive(kind))
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="is neither the folder of a run nor one of its checkpoints"):
        resume.find(name, [])
    assert tree(tmp_path) == before


# the state of a checkpoint, with the right digests --------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    with ParallelWrapper(small_model(), 2) as wrapper:
        wrapper.fit(Loader(small_dataset(20), 4), 1)
        return wrapper.checkpoint(folder)


def changed(state: Any, keys: str, value: Any) -> None:
    *above, last = keys.split(":")
    for key in above:
        state = state[int(key) if key.isdigit() else key]
    if value is None:
        del state[last]
    else:
        state[int(last) if last.isdigit() else last] = value


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ("workers", 7, "not the state of a training run, or of an earlier version"),
        ("workers:1", "x", "not the state of a training run"),
        ("workers:0:arrays", ["a"], "not the state of a training run"),
        ("workers:0:arrays:trainer/deal", 3, "KeyError: 3"),
        ("workers:0:arrays:trainer/deal", "nothing", "KeyError: 'nothing'"),
        ("workers:0:arrays", {"a/b/c": "trainer/deal"}, "no place for the array"),
        ("workers:0:numbers:trainer", None, "trainer"),
        ("workers:0:numbers:trainer:iteration", "5", r"trainer.iteration: expected a number of at least 0, found '5'"),
        ("workers:0:numbers:trainer:iteration", -7, "found -7"),
        ("workers:0:numbers:trainer:epoch", 10**30, "found 1000"),
        ("workers:0:numbers:trainer:round", True, "found True"),
        ("workers:0:numbers:trainer:round", float("nan"), "found nan"),
        ("workers:0:numbers:clock:extra", 1, "extra"),
        ("workers:0:numbers:since", 5, "not the state of a training run"),
        ("workers:0:numbers:replica:updates", None, "KeyError: 'updates'"),
        ("workers:0:numbers:synchronizer:tally", 3, "state"),
        ("workers:0:arrays:replica/optimizer/velocity/conv1.weight", "trainer/deal", "expected an array of shape"),
    ],
)
def test_a_forged_state_is_refused(keys: str, value: Any, said: str, good: Path, tmp_path: Path) -> None:
    stored = read(good)
    changed(stored.state, keys, value)
    path = Checkpoints(tmp_path).save(5, stored.state, stored.arrays)
    with ParallelWrapper(small_model(), 2) as wrapper, pytest.raises(CupynetError, match=said) as caught:
        wrapper.restore(path)
    assert caught.value.exit_code == 65 or "this state has no" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "cannot be read"),
        ('{"workers": ' + "9" * 5000 + "}", "cannot be read"),
        ("[]", "expected an object, found list"),
    ],
)
def test_a_malformed_state_file_is_refused(text: str, said: str, good: Path, tmp_path: Path) -> None:
    path = tmp_path / good.name
    shutil.copytree(good, path)
    (path / "manifest.json").unlink()
    (path / "state.json").write_text(text)
    _write_manifest(path)
    with pytest.raises(DataError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_trusted_modules_exist() -> None:
    with pytest.raises(ConfigError, match=re.escape("trusted_modules=[os.path,nonexistent]: ")):
        Experiment(settings_of("trusted_modules=[os.path,nonexistent]"))


LONG = "d" * 300


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda path: read_run(path), ConfigError),
        (lambda path: Trained(path), ConfigError),
        (lambda path: resume.find(path, []), ConfigError),
        (lambda path: for_hydra([f"resume={path}"]), ConfigError),
        (lambda path: Folder(path), DataError),
        (lambda path: History(path).check_path(), OutputError),
        (lambda path: write_output(path, b""), OutputError),
    ],
    ids=["report", "evaluate", "train", "tune", "data", "history", "export"],
)
@pytest.mark.parametrize("path", [LONG, "/".join([LONG[:200]] * 30)], ids=["long", "deep"])
def test_an_impossible_path_is_refused(
    path: str, use: Callable[[str], Any], kind: type[Exception], in_folder: Path
) -> None:
    with pytest.raises(kind):
        use(path)


@pytest.mark.parametrize("setting", ["~data", "data=null", "data=1"])
def test_a_run_cannot_do_without_data(setting: str, run: Path) -> None:
    (run / "summary.json").touch()
    with pytest.raises(ConfigError, match="^data: "):
        Trained("run").settings([setting])


def test_a_history_is_not_cut_before_its_beginning(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.start(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-5"):
        history.restore({"bytes": -5})
    history.close()


@pytest.mark.parametrize("name", ["checkpoints", "step-00000001", "step-00000001/checkpoints"])
def test_a_run_may_have_the_name_of_a_checkpoint(name: str, run: Path) -> None:
    folder = run.parent / "there" / name
    folder.parent.mkdir(parents=True)
    run.rename(folder)
    step = folder / "checkpoints" / "step-00000007"
    for path in (folder, folder / "checkpoints", step):
        assert resume.run_of(path) == folder
        assert resume.checkpoint_of(path) == (step if path == step else folder / "checkpoints")
