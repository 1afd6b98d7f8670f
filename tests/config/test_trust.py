"""Nothing that comes in a file runs, is trusted, or writes where nobody asked it to: a corpus of hostile ones.

Each is refused, and the folder is as it was: a canary lies where its code would have left something. The tables of
those files make the file long.
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
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model

CANARY = "CANARY"  # what each of them would make in the folder where the command was started


def tree(folder: Path) -> dict[str, int]:
    """Everything below a folder; of files the time they were written. (A lock comes and goes in a run's folder.)"""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: 0 if path.is_dir() else path.lstat().st_mtime_ns for name, path in found.items()}


@pytest.fixture
def refuses(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refuses(named, *arguments): the command names that in one line, ends with `code`, and leaves nothing."""

    def call(named: str, *arguments: str, code: int = 2, check: Callable[[Settings], Any] = Experiment) -> None:
        capsys.readouterr()
        before = tree(in_folder)
        assert command(*arguments, check=check) == (code, [])
        stderr = capsys.readouterr().err
        assert named in stderr and stderr.count("\n") == 1 and stderr.startswith("cupynet: "), stderr
        assert tree(in_folder) == before and not (in_folder / CANARY).exists()

    return call


# what a file of settings says -----------------------------------------------------------------------------------------

PARTS = {
    "a borrowed name": ("optimizer: {_target_: cupynet.commands.train.signal.Signals}", "optimizer._target_"),
    "a borrowed function": ("loss: {_target_: cupynet.commands.train.os.mkdir, path: CANARY}", "loss._target_"),
    "in a list in a part": (
        "callbacks: {a: {_target_: cupynet.training.History, path: [{x: {_target_: os.mkdir, path: CANARY}}]}}",
        "callbacks.a.path[0].x._target_",
    ),
    "threads": ("optimizer: {_target_: cupynet.parallel.ThreadLauncher, workers: 9999}", "optimizer._target_"),
    "eval": ("loss: {_target_: builtins.eval}", "loss._target_"),
    "a process": ("loss: {_target_: subprocess.Popen, args: [mkdir, CANARY]}", "loss._target_"),
    "half built": ("optimizer: {_partial_: true}", "optimizer._partial_"),
    "not recursive": ("optimizer: {_recursive_: false}", "optimizer._recursive_"),
    "arguments by place": ("optimizer: {_args_: [1]}", "optimizer._args_"),
}
FILES = {
    "a part": "optimizer: {_target_: os.mkdir, path: CANARY}\n",
    "by a reference": 'loss: "${oc.create:{_target_: os.mkdir, path: CANARY}}"\n',
    "by the environment": "loss:\n  _target_: ${oc.env:EVIL}\n",
    "a tag": "loss: !!python/object/apply:os.mkdir [CANARY]\n",
}


@pytest.mark.parametrize("name", PARTS)
def test_settings_build_nothing_untrusted(name: str, in_folder: Path) -> None:
    text, setting = PARTS[name]
    settings = settings_of()
    ((group, part),) = yaml.safe_load(text).items()
    with refused(setting):
        changes: dict[str, Any] = {group: {**getattr(settings, group), **part}}
        Experiment(replace(settings, **changes))
    assert list(in_folder.iterdir()) == []


@pytest.fixture
def untrusted_config(in_folder: Path, minimal_conf: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes its argument to experiment/evil.yaml and returns the folder for --config-dir."""
    monkeypatch.setattr(composing, "conf_folder", vars(hydra_main)["conf_folder"])  # for `config.compose` too

    def write(text: str) -> Path:
        (in_folder / "theirs" / "experiment").mkdir(parents=True)
        (in_folder / "theirs" / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}")
        return Path("theirs")

    return write


@pytest.mark.parametrize(("name", "named"), [("a part", "optimizer._target_"), ("a tag", "os.mkdir")])
def test_a_config_file_runs_no_code(
    name: str, named: str, refuses: Any, untrusted_config: Callable[[str], Path]
) -> None:
    untrusted_config(FILES[name])
    made = ("--config-dir", "theirs", "+experiment=evil")
    refuses(named, *made, check=lambda settings: build(settings.optimizer, "optimizer"))


@pytest.mark.parametrize("name", ["by a reference", "by the environment"])
def test_an_interpolation_in_a_config_file_runs_no_code(
    name: str, untrusted_config: Callable[[str], Path], in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", "os.mkdir")
    folder = untrusted_config(FILES[name])
    before = tree(in_folder)
    with refused("loss._target_", "os.mkdir"):
        build(config.compose(["+experiment=evil"], folder).loss, "loss")
    assert tree(in_folder) == before


# what a run has stored ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("minimal_conf")
def test_a_stored_run_does_not_decide_where_data_are_downloaded(
    command: Command, in_folder: Path, refuses: Any
) -> None:
    stored.keep(in_folder / "run", settings_of("data.folder=elsewhere"), ["data.folder=elsewhere"])
    (in_folder / "run" / "summary.json").touch()
    refuses("data.folder=elsewhere: ", "resume=run")
    with refused("data.folder", "elsewhere"):
        Trained("run").settings()
    typed = ["data.folder=elsewhere"]
    assert command("resume=run", *typed)[0] == 0 and Trained("run").settings(typed).data["folder"] == "elsewhere"
    assert not (in_folder / "elsewhere").exists()


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join(['*' + m] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)
)
STORED = {
    "an alias": LAUGHS,
    "deep": "a: " + "[" * 100_000,
    "NUL": 'loss:\n  _target_: "a\\0b"\n',
    "long": f"a: {'x' * (1 << 20)}\n",
    "the environment": "seed: ${oc.env:HOME}\n",
    "a part of a value": "data:\n  folder: x${seed}\nseed: 1\n",
    "a reference to itself": "seed: ${seed}\n",
    "a reference to nothing": "seed: ${sed}\n",
    "a class by a resolver": "loss: '${oc.create:{_target_: os.mkdir}}'\n",
    "a number without end": "seed: 0x" + "f" * 80_000 + "\n",
    "a default without end": f"seed: ${{cupynet.env:X,{'9' * 8000}}}\n",
    "a tag": "loss: !!python/object/apply:os.mkdir [CANARY]\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "no text": "\0",
    "no mapping": "- 1\n",
    "Hydra's own": "hydra:\n  run: {dir: CANARY}\n",
}


NAMES = ("it's a\\b=c,é{x}[1]#~$x", "a b", "a\\b", "a\\'b", "a\\", "a=b,c", "{x}", "[1]", "#~+@", "$x", "é")


@pytest.fixture
def run(in_folder: Path, minimal_conf: None) -> Path:
    """The folder of a run with two workers that has stored its settings."""
    stored.keep(in_folder / "run", settings_of("workers=2"), ["hydra.run.dir=run", "workers=2"])
    (in_folder / "run" / "train.log").touch()
    return in_folder / "run"


@pytest.mark.parametrize("name", STORED)
def test_the_stored_settings_of_a_run_are_plain_values(name: str, run: Path) -> None:
    path = run / ".hydra" / "config.yaml"
    path.write_text(STORED[name])
    with pytest.raises((DataError, ConfigError)) as caught:
        config.load(run)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        "loss:\n  _target_: os.mkdir\n  path: CANARY\n",
        'loss: "${oc.create:{_target_: os.mkdir, path: CANARY}}"\n',
        "loss:\n  _target_: subprocess.Popen\n  args: [mkdir, CANARY]\n",
    ],
)
def test_an_evaluated_run_builds_no_untrusted_class(part: str, run: Path) -> None:
    path = run / ".hydra" / "config.yaml"
    before, text = tree(run.parent), path.read_text()
    changed = re.sub(r"^loss:\n(  .*\n)+", lambda _: part, text, flags=re.MULTILINE)
    path.write_text(changed.replace("trusted_modules: []", "trusted_modules: [os, subprocess, posix]"))
    assert part in path.read_text()
    with pytest.raises((ConfigError, DataError)):
        Experiment(config.load(run))
    assert tree(run.parent).keys() == before.keys()


def test_stored_numbers_are_limited_for_all_who_read_them(run: Path) -> None:
    (run / ".hydra" / "config.yaml").write_text(f"seed: [0x{'f' * 80_000}]\n")
    with pytest.raises(DataError):
        config.written(run)


@pytest.mark.parametrize(
    "overrides",
    [
        *(["experiment=../../theirs/evil"], ["experiment=[../../theirs/evil]"], ["+callbacks@hydra.callbacks=default"]),
        *(["nothing=1"], ["--config-dir=theirs"], ["data=a.b"], [{"a": 1}], "seed: 1\n", "["),
    ],
    ids=str,
)
def test_the_stored_command_line_of_a_run_has_settings_only(overrides: Any, run: Path) -> None:
    text = overrides if isinstance(overrides, str) else json.dumps(overrides)
    (run / ".hydra" / "overrides.yaml").write_text(text)
    with pytest.raises(DataError) as caught:
        config.overrides_of(run)
    assert "overrides.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_resumed_run_writes_nowhere_else(run: Path, refuses: Any) -> None:
    path = run / ".hydra" / "config.yaml"
    old, new = "cupynet.training.History\n    path: null", "cupynet.training.History\n    path: /CANARY"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refuses("callbacks.history.path=/CANARY", "resume=run")


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


def test_links_in_the_folder_of_a_run(run: Path, refuses: Any) -> None:
    victim = run.parent / "victim"
    victim.write_text("precious")
    for name in ("history.jsonl", "train.log", ".hydra/overrides.yaml", "running.json", "tensorboard"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
        refuses(name, "resume=run", code=65)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    assert victim.read_text() == "precious"


# links below the folder of a run --------------------------------------------------------------------------------------

FOLDERS = ("sub", "sub/deep", "checkpoints", "checkpoints/step-00000001", "tensorboard", ".hydra/more", "wandb/run-1")


def over_another_link(link: Path, victim: Path) -> None:
    (link.parent / "other").symlink_to(victim)
    link.symlink_to("other")


LEADING_OUT: dict[str, Callable[[Path, Path], object]] = {
    "to a folder": lambda link, victim: link.symlink_to(victim),
    "to a folder, relative": lambda link, victim: link.symlink_to(os.path.relpath(victim, link.parent)),
    "to a file": lambda link, victim: link.symlink_to(victim / "notes.jsonl"),
    "to nothing yet": lambda link, victim: link.symlink_to(victim / "new"),
    "over another link": over_another_link,
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


@pytest.mark.parametrize(("place", "kind"), [*zip(FOLDERS, LEADING_OUT, strict=True), ("sub/deep", "a pipe")])
def test_a_link_below_the_folder_of_a_run_leads_nowhere(place: str, kind: str, run: Path, victim: Path) -> None:
    """One or two levels down; both by itself and in a stored path."""
    (run / place).mkdir(parents=True)
    link = run / place / "link"
    LEADING_OUT[kind](link, victim)
    before = tree(victim)
    with pytest.raises(DataError):
        resume.find("run", [])
    for path in (link, link / "new") if kind not in ("a hard link", "a pipe") else ():
        with refused("callbacks.a.path"):
            stored.check_outputs({"a": {"_target_": "cupynet.training.History", "path": str(path)}}, run, [])
    assert tree(victim) == before


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
    with pytest.raises(DataError):
        resume.find("run", [])


def test_a_fast_dev_run_with_links_is_not_overwritten(run: Path, victim: Path, refuses: Any) -> None:
    (run / "FAST_DEV_RUN.txt").touch()
    (run / "checkpoints").symlink_to(victim / "checkpoints")  # where a new run removes the old checkpoints
    refuses("run/checkpoints", "hydra.run.dir=run", code=65, check=lambda settings: None)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *(("History", path) for path in ("..", "../x", "run", "run/.", "run/..", "run/sub/../../victim", "run2/x")),
        *((name, path) for name, path in zip(WRITERS, ("victim/x", "/CANARY", "runs/x", "~/x", "run"), strict=True)),
    ],
)
def test_a_stored_callback_writes_nowhere_but_into_the_folder_of_its_run(
    name: str, path: str, run: Path, victim: Path
) -> None:
    parts = {"a": {"_target_": f"cupynet.training.{name}", "path": path}}
    with refused("callbacks.a.path", path):
        stored.check_outputs(parts, Path("run"), ["epochs=3"])
    stored.check_outputs(parts, Path("run"), [f"callbacks.a.path='{path}'"])  # who types it may


@pytest.mark.parametrize("path", ["run/x", "run/a/../x", "run/../run/x", "./run/x/y", "ABSOLUTE"])
def test_a_stored_path_inside_the_folder_is_kept(path: str, run: Path) -> None:
    path = path.replace("ABSOLUTE", str(run / "x"))
    parts = {"a": {"_target_": "cupynet.training.History", "path": path}}
    for folder in (Path("run"), run):
        stored.check_outputs(parts, folder, [])


MLFLOW = ("cupynet.training.MLflow", "cupynet.training.callbacks.loggers.mlflow.MLflow")


@pytest.mark.parametrize("uri", [{}, {"uri": None}, {"uri": "sqlite:///run/mlflow.db"}])
@pytest.mark.parametrize("target", MLFLOW)
def test_a_stored_run_does_not_decide_where_mlflow_writes(target: str, uri: Any) -> None:
    parts = {"m": {"_target_": target, **uri}}
    for typed in ("epochs=2", "callbacks.m={artifacts: true}", "callbacks={m: {name: a}}", "callbacks.m2.uri=x"):
        with refused("callbacks.m.uri"):
            stored.check_outputs(parts, Path("run"), [typed])
    for typed in ("callbacks.m.uri=null", "+callbacks.m={uri: x}", "callbacks={m: {uri: x}}", "callbacks=mlflow"):
        stored.check_outputs(parts, Path("run"), [typed])


def test_a_resumed_run_does_not_write_to_mlflow(run: Path, refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{CANARY}")
    path = run / ".hydra" / "config.yaml"
    part = "callbacks:\n  m:\n    _target_: cupynet.training.MLflow\n"
    path.write_text(path.read_text().replace("callbacks:\n", part))
    refuses("callbacks.m.uri=null", "resume=run")


def test_changing_a_part_does_not_permit_its_stored_places(run: Path) -> None:
    places = {"mode": "online", "path": "/CANARY"}
    parts: dict[str, Any] = {"a": {"_target_": "cupynet.training.WandB", **places}}
    for typed in ("callbacks.a={project: x}", "callbacks.a={mode: offline}", "callbacks.a.project=x"):
        with pytest.raises(ConfigError):
            stored.check_outputs(parts, run, [typed])
    stored.check_outputs(parts, run, ["callbacks.a={mode: online, path: /CANARY}"])
    del parts["a"]["path"]
    with refused("callbacks.a.mode", "online"):
        stored.check_outputs(parts, run, [])


def test_a_folder_name_is_not_interpolated(run: Path, refuses: Any) -> None:
    shutil.move(run, run.parent / "${oc.env:HOME}")
    refuses("${oc.env:HOME}", "resume=${oc.env:HOME}", code=65)


@pytest.mark.parametrize("name", ["history.jsonl", "running.json"])
def test_pipes_in_the_folder_of_a_run(name: str, run: Path, refuses: Any) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    refuses(name, "resume=run", code=65)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_is_found_and_quoted(name: str, run: Path) -> None:
    shutil.move(run, run.parent / name)
    quoted = resume.quoted(Path(name))
    for typed in (name, f"'{name}'"):
        assert resume.find(str(resume.asked([f"resume={typed}"])), []) == Path(name)
    given: Any = OverridesParser.create().parse_override(f"hydra.run.dir={quoted}").value()
    assert OmegaConf.create({"dir": given}).dir == name


def test_a_run_resumes_in_a_folder_of_any_name(run: Path, command: Command) -> None:
    name = NAMES[0]
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
    with pytest.raises(DataError) as caught:
        load_weights(tmp_path / "w.safetensors")
    assert "w.safetensors" in str(caught.value) and "\n" not in str(caught.value)
    path = Checkpoints(tmp_path / "c").save(1, {"workers": []}, {"weights": {}})
    (path / "manifest.json").unlink()
    (path / "weights.safetensors").write_bytes(WEIGHTS[name])
    _write_manifest(path)
    with pytest.raises(DataError):
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
    with refused("resume", repr(name)):
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
    ("keys", "value"),
    [
        ("workers", 7),
        ("workers:1", "x"),
        ("workers:0:arrays", ["a"]),
        ("workers:0:arrays:trainer/deal", "nothing"),
        ("workers:0:arrays", {"a/b/c": "trainer/deal"}),
        ("workers:0:numbers:trainer", None),
        ("workers:0:numbers:trainer:iteration", "5"),
        ("workers:0:numbers:trainer:iteration", -7),
        ("workers:0:numbers:trainer:epoch", 10**30),
        ("workers:0:numbers:trainer:round", True),
        ("workers:0:numbers:trainer:round", float("nan")),
        ("workers:0:numbers:clock:extra", 1),
        ("workers:0:numbers:since", 5),
        ("workers:0:numbers:replica:updates", None),
        ("workers:0:numbers:synchronizer:tally", 3),
        ("workers:0:arrays:replica/optimizer/velocity/conv1.weight", "trainer/deal"),
    ],
)
def test_a_forged_state_is_refused(keys: str, value: Any, good: Path, tmp_path: Path) -> None:
    stored = read(good)
    changed(stored.state, keys, value)
    path = Checkpoints(tmp_path).save(5, stored.state, stored.arrays)
    with ParallelWrapper(small_model(), 2) as wrapper, pytest.raises(CupynetError) as caught:
        wrapper.restore(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"workers": ' + "9" * 5000 + "}", "[]"], ids=["deep", "long", "list"])
def test_a_malformed_state_file_is_refused(text: str, good: Path, tmp_path: Path) -> None:
    path = tmp_path / good.name
    shutil.copytree(good, path)
    (path / "manifest.json").unlink()
    (path / "state.json").write_text(text)
    _write_manifest(path)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_trusted_modules_exist() -> None:
    with refused("trusted_modules"):
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
    with refused("data"):
        Trained("run").settings([setting])


def test_a_history_is_not_cut_before_its_beginning(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.start(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
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
