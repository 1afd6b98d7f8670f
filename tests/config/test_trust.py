"""Hostile files and folders: nothing in them runs, is trusted, or writes to places that the user did not name.

The tables are a corpus of attacks. Each is rejected and leaves the folder unchanged. Code that ran would leave a canary
there.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cupynet import config
from cupynet.config import resume, stored
from cupynet.config.experiment import Experiment
from cupynet.config.instantiate import build
from cupynet.config.load_model import LoadedRun
from cupynet.config.overrides import quoted
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError, CupynetError, DataError
from cupynet.data import Loader
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.runs.layout import SETTINGS
from cupynet.training import ParallelWrapper
from tests.support.commands import Command, Line
from tests.support.refusals import data_error, refused
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model

Refuses = Callable[..., None]
CANARY = "CANARY"  # created in the working folder by a successful attack


def tree(folder: Path) -> dict[str, int]:
    """Return all paths below a folder. Only files have their modification times, since locks change folders."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: 0 if path.is_dir() else path.lstat().st_mtime_ns for name, path in found.items()}


@pytest.fixture
def refuses(command: Command, in_folder: Path, error_line: Line) -> Refuses:
    """Return refuses(named, *arguments): check that a command fails in one line with `named` and writes nothing."""

    def call(named: str, *arguments: str, code: int = 2, check: Callable[[Settings], Any] = Experiment) -> None:
        before = tree(in_folder)
        assert command(*arguments, check=check) == (code, [])
        assert named in error_line() and tree(in_folder) == before

    return call


@pytest.fixture
def run(in_folder: Path, minimal_conf: None) -> Path:
    stored.keep(in_folder / "run", settings_of("workers=2"), ["hydra.run.dir=run", "workers=2"])
    (in_folder / "run" / "train.log").touch()
    return in_folder / "run"


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


FILES = {
    "a part": "loss: {_target_: os.mkdir, path: CANARY}\n",
    "by a reference": 'loss: "${oc.create:{_target_: os.mkdir, path: CANARY}}"\n',
    "a tag": "loss: !!python/object/apply:os.mkdir [CANARY]\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_runs_no_code(name: str, in_folder: Path, refuses: Refuses) -> None:
    path = in_folder / "theirs" / "experiment" / "evil.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{FILES[name]}")
    arguments = ("--config-dir", "theirs", "experiment=evil")
    refuses("os.mkdir", *arguments, check=lambda settings: build(settings.loss, "loss"))


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join(['*' + m] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)
)
STORED = {
    "an alias": LAUGHS,
    "deep": "callbacks: " + "{a: " * 70 + "1" + "}" * 70,
    "NUL": 'loss:\n  _target_: "a\\0b"\n',
    "the environment": "seed: ${oc.env:HOME}\n",
    "a reference to itself": "seed: ${seed}\n",
    "a class by a resolver": "loss: '${oc.create:{_target_: os.mkdir}}'\n",
    "a number without end": "seed: 0x" + "f" * 80_000 + "\n",
    "a default without end": f"seed: ${{cupynet.env:X,{'9' * 8000}}}\n",
    "a tag": "loss: !!python/object/apply:os.mkdir [CANARY]\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "no mapping": "- 1\n",
    "Hydra's own": "hydra:\n  run: {dir: CANARY}\n",
}


@pytest.mark.parametrize("name", STORED)
def test_stored_settings_of_a_run_that_are_not_plain_values_are_refused(name: str, run: Path) -> None:
    (run / SETTINGS).write_text(STORED[name])
    with pytest.raises((DataError, ConfigError)) as caught:
        config.load(run)
    assert str(caught.value).startswith(f"{run / SETTINGS}: ") and "\n" not in str(caught.value)


def test_an_alias_after_a_byte_order_mark_is_found(run: Path) -> None:
    """libyaml takes this line for a comment, but PyYAML's own parser does not."""
    (run / SETTINGS).write_text("a: &a [x]\n\ufeff#b: [*a, *a]\n")
    with pytest.raises(DataError):
        config.load(run)


def test_evaluating_a_run_builds_no_untrusted_class(run: Path) -> None:
    found = yaml.safe_load((run / SETTINGS).read_text())
    evil = {"_target_": "subprocess.Popen", "args": ["mkdir", CANARY]}
    found |= {"loss": evil, "trusted_modules": ["os", "subprocess"]}
    (run / SETTINGS).write_text(yaml.safe_dump(found))
    with refused("loss._target_"):
        Experiment(config.load(run))
    assert not (run.parent / CANARY).exists()


@pytest.mark.parametrize(
    "overrides",
    [
        *(["experiment=../../theirs/evil"], ["experiment=[../../theirs/evil]"], ["+callbacks@hydra.callbacks=default"]),
        *(["nothing=1"], ["--config-dir=theirs"], ["data=a.b"], [{"a": 1}], "seed: 1\n", "["),
    ],
    ids=str,
)
def test_a_stored_command_line_of_a_run_with_more_than_settings_is_refused(overrides: Any, run: Path) -> None:
    text = overrides if isinstance(overrides, str) else json.dumps(overrides)
    (run / ".hydra" / "overrides.yaml").write_text(text)
    with data_error("overrides.yaml"):
        config.overrides_of(run)


def test_a_resumed_run_takes_no_trusted_modules_or_hydra_settings_from_its_folder(run: Path, command: Command) -> None:
    evil = ["trusted_modules=[os]", "++trusted_modules=[os]", "hydra.run.dir=CANARY", "hydra/launcher=evil"]
    evil += ["hydra.callbacks.evil._target_=os.mkdir", "hydra.callbacks.evil.path=CANARY"]
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(["workers=2", *evil]))
    (run / ".hydra" / "hydra.yaml").write_text("hydra:\n  run: {dir: CANARY}\n  callbacks: {a: {_target_: os.mkdir}}\n")
    changed(run / SETTINGS, "trusted_modules: []", "trusted_modules: [os]")
    code, (settings,) = command("resume=run")
    assert (code, settings.trusted_modules, settings.workers) == (0, [], 2)
    assert not (run.parent / CANARY).exists()


@pytest.fixture
def victim(run: Path) -> Path:
    """Return a folder outside the run's, whose content must not change."""
    folder = run.parent / "victim"
    (folder / "checkpoints" / "step-00000111").mkdir(parents=True)
    (folder / "notes.jsonl").write_text("precious")
    return folder


def check_outputs(target: str, *typed: str, folder: Path = Path("run"), **arguments: Any) -> None:
    """Check where a stored callback `a` writes, with these settings on the command line."""
    callbacks = {"a": {"_target_": f"cupynet.training.{target}", **arguments}}
    stored.check_outputs(replace(settings_of(), callbacks=callbacks), folder, typed)


@pytest.mark.usefixtures("minimal_conf")
def test_a_stored_run_does_not_choose_the_folder_for_downloads(
    command: Command, in_folder: Path, refuses: Refuses
) -> None:
    typed = ["data.folder=elsewhere"]
    stored.keep(in_folder / "run", settings_of(*typed), typed)
    (in_folder / "run" / "summary.json").touch()
    refuses("data.folder=elsewhere: ", "resume=run")
    with refused("data.folder", "elsewhere"):
        LoadedRun("run").settings()
    assert command("resume=run", *typed)[0] == 0
    assert LoadedRun("run").settings(typed).data["folder"] == "elsewhere"
    assert not (in_folder / "elsewhere").exists()


def test_a_resumed_run_with_a_stored_path_outside_its_folder_exits_with_2(run: Path, refuses: Refuses) -> None:
    part = "cupynet.training.HistoryWriter\n    path: "
    changed(run / SETTINGS, f"{part}null", f"{part}/CANARY")
    refuses("callbacks.history.path=/CANARY", "resume=run")


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    ("target", "path"),
    [
        *(("HistoryWriter", path) for path in ("..", "../x", "run", "run/.", "run/..", "run/sub/../../victim")),
        *(("HistoryWriter", "run2/x"), ("HistoryWriter", "victim/x"), ("Checkpoint", "/CANARY")),
        *(("TensorBoard", "runs/x"), ("WandB", "~/x")),
        ("Profile", "run"),
    ],
)
def test_a_stored_callback_writes_nowhere_but_into_the_folder_of_its_run(target: str, path: str) -> None:
    with refused("callbacks.a.path", path):
        check_outputs(target, "epochs=3", path=path)
    check_outputs(target, f"callbacks.a.path='{path}'", path=path)  # allowed if the user types it


def test_a_stored_path_inside_the_folder_of_its_run_is_accepted(run: Path) -> None:
    for path in ("run/x", "run/a/../x", "run/../run/x", "./run/x/y", str(run / "x")):
        check_outputs("HistoryWriter", path=path)
        check_outputs("HistoryWriter", path=path, folder=run)


MLFLOW = "callbacks.loggers.mlflow.MLflow"


@pytest.mark.parametrize(
    ("target", "uri"), [("MLflow", {}), (MLFLOW, {"uri": None}), ("MLflow", {"uri": "sqlite:///run/mlflow.db"})]
)
def test_a_stored_run_does_not_decide_where_mlflow_writes(target: str, uri: dict[str, Any]) -> None:
    for typed in ("epochs=2", "callbacks.a={artifacts: true}", "callbacks={a: {name: a}}", "callbacks.a2.uri=x"):
        with refused("callbacks.a.uri"):
            check_outputs(target, typed, **uri)
    for typed in ("callbacks.a.uri=null", "+callbacks.a={uri: x}", "callbacks={a: {uri: x}}", "callbacks=mlflow"):
        check_outputs(target, typed, **uri)


def test_changing_another_setting_of_a_callback_does_not_permit_its_stored_places() -> None:
    for typed in ("callbacks.a={project: x}", "callbacks.a={mode: offline}", "callbacks.a.project=x"):
        with pytest.raises(ConfigError):
            check_outputs("WandB", typed, mode="online", path="/CANARY")
    check_outputs("WandB", "callbacks.a={mode: online, path: /CANARY}", mode="online", path="/CANARY")
    with refused("callbacks.a.mode", "online"):
        check_outputs("WandB", mode="online")


def over_another_link(link: Path, victim: Path) -> None:
    (link.parent / "other").symlink_to(victim)
    link.symlink_to("other")


LEADING_OUT: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "to a folder": ("sub", lambda link, victim: link.symlink_to(victim)),
    "to a file": ("checkpoints", lambda link, victim: link.symlink_to(victim / "notes.jsonl")),
    "to nothing yet": ("checkpoints/step-00000001", lambda link, victim: link.symlink_to(victim / "new")),
    "over another link": ("tensorboard", over_another_link),
    "a hard link": (".hydra/more", lambda link, victim: os.link(victim / "notes.jsonl", link)),
    "a pipe": ("wandb/run-1", lambda link, victim: os.mkfifo(link)),
}


@pytest.mark.parametrize("kind", LEADING_OUT)
def test_a_run_with_links_or_pipes_out_of_its_folder_cannot_be_resumed(kind: str, run: Path, victim: Path) -> None:
    """Both the link and stored paths through it are rejected."""
    place, make = LEADING_OUT[kind]
    link = run / place / "link"
    link.parent.mkdir(parents=True, exist_ok=True)
    make(link, victim)
    before = tree(victim)
    with pytest.raises(DataError):
        resume.find("run", [])
    for path in (link, link / "new") if link.is_symlink() else ():
        with refused("callbacks.a.path"):
            check_outputs("HistoryWriter", folder=run, path=str(path))
    assert tree(victim) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("history.jsonl", "to a file"), ("train.log", "a pipe"), (".hydra/overrides.yaml", "to a file")),
        *(("running.json", "a pipe"), ("tensorboard", "to a file")),
    ],
)
def test_a_link_or_pipe_in_place_of_a_file_of_a_run_exits_with_65_and_is_not_followed(
    name: str, kind: str, run: Path, victim: Path, refuses: Refuses
) -> None:
    (run / name).unlink(missing_ok=True)
    LEADING_OUT[kind][1](run / name, victim)
    refuses(name, "resume=run", code=65)
    assert (victim / "notes.jsonl").read_text() == "precious"


def test_links_that_stay_in_the_folder_of_a_run_are_followed(run: Path, victim: Path) -> None:
    """W&B's links are too: one leads to its cache, and uploaded files link to the run's location at that time."""
    logs = run / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to(logs.parent.name)
    (logs / "debug-core.log").symlink_to(victim / "notes.jsonl")
    (logs / "circle").symlink_to("circle")
    assert resume.find("run", []) == Path("run")
    check_outputs("TensorBoard", path="run/wandb/latest-run/events")
    (logs / "folder").symlink_to(victim)
    with pytest.raises(DataError):
        resume.find("run", [])


NAMES = ("it's a\\b=c,é{x}[1]#~$x", "a b", "a\\b", "a\\'b", "a\\", "a=b,c", "{x}", "[1]", "#~+@", "$x", "é")


def test_the_name_of_a_resumed_folder_is_not_interpolated(run: Path, refuses: Refuses) -> None:
    shutil.move(run, run.parent / "${oc.env:HOME}")
    refuses("${oc.env:HOME}", "resume=${oc.env:HOME}", code=65)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_a_folder_of_any_name_is_found_and_its_name_quoted(name: str, run: Path) -> None:
    shutil.move(run, run.parent / name)
    for typed in (name, f"'{name}'"):
        assert resume.find(str(resume.asked([f"resume={typed}"])), []) == Path(name)
    given: Any = OverridesParser.create().parse_override(f"hydra.run.dir={quoted(Path(name))}").value()
    assert OmegaConf.create({"dir": given}).dir == name


def test_resuming_a_folder_without_a_run_is_refused(in_folder: Path) -> None:
    (in_folder / "run.zip").write_bytes(b"PK")
    for name in ("run.zip", "a\0b", "a" * 5000, "../nothing", "/nothing", "run/checkpoints/step-1/../.."):
        with refused("resume", repr(name)):
            resume.find(name, [])
    assert os.listdir(in_folder) == ["run.zip"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    with ParallelWrapper(small_model(), 2) as wrapper:
        wrapper.fit(Loader(small_dataset(20), 4), epochs=1)
        return wrapper.checkpoint(folder)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("workers", 7),
        ("workers:1", "x"),
        ("workers:0:arrays:trainer/deal", "nothing"),
        ("workers:0:arrays", {"a/b/c": "trainer/deal"}),
        ("workers:0:numbers:trainer", ...),
        ("workers:0:numbers:trainer:iteration", -7),
        ("workers:0:numbers:trainer:epoch", 10**30),
        ("workers:0:numbers:trainer:round", True),
        ("workers:0:numbers:replica:updates", ...),
        ("workers:0:numbers:clock:samples", "x"),
        ("workers:0:numbers:losses:samples", None),
        ("workers:0:numbers:losses:samples", 10**400),
        ("workers:0:numbers:synchronizer:tally", 3),
        ("workers:0:arrays:replica/optimizer/velocity/conv1.weight", "trainer/deal"),
    ],
)
def test_a_checkpoint_with_a_forged_state_is_refused(keys: str, value: Any, good: Path, tmp_path: Path) -> None:
    """A value of `...` means a missing entry."""
    checkpoint = read(good)
    *above, last = [int(key) if key.isdigit() else key for key in keys.split(":")]
    place: Any = checkpoint.state
    for key in above:
        place = place[key]
    place[last] = value
    if value is ...:
        del place[last]
    path = Checkpoints(tmp_path).save(5, checkpoint.state, checkpoint.arrays)
    with ParallelWrapper(small_model(), 2) as wrapper, pytest.raises(CupynetError) as caught:
        wrapper.restore(path)
    assert "\n" not in str(caught.value)
