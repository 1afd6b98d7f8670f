"""Users' files and stored runs of earlier versions still work, although classes and arguments have moved.

`targets_52b31d6.json` contains the parts in every file of conf/ at that commit, and `run_52b31d6` is one of its runs.
`run_0171862e`, from another commit, has its last checkpoint: a small `lenet_norm`, two workers, a weight average.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cupynet import config
from cupynet.commands.evaluate import evaluated
from cupynet.config.instantiate import build
from cupynet.config.removed import translated
from cupynet.config.stored import keep
from cupynet.core.errors import ConfigError
from cupynet.reporting.comparison.groups import compared
from cupynet.reporting.comparison.runs import find
from cupynet.reporting.page import write_page
from cupynet.runs.run import Run
from tests.support.called import train_job
from tests.support.commands import Command, summary_of
from tests.support.settings import settings_of

GOLDEN = Path(__file__).parents[1] / "golden"
NODES: dict[str, Any] = json.loads((GOLDEN / "targets_52b31d6.json").read_text())
USERS_FILES = ("data/folder", "data/idx", "data/npz")  # found, and rejected without a path


@pytest.mark.parametrize("file", NODES)
def test_every_part_of_the_conf_of_an_earlier_version_is_built(file: str) -> None:
    group = file.split("/")[0]
    node = translated({group: NODES[file]})[group]  # as for a stored run's settings
    if file in USERS_FILES:
        with pytest.raises(ConfigError):
            build(node, group)
        return
    made = build(node, group)
    parts, built = ([node], [made]) if "_target_" in node else (node.values(), made.values())
    for part, each in zip(parts, built, strict=True):
        assert part is None or part["_target_"].rpartition(".")[2] == type(each).__name__


ENDINGS = (", 1 batch: a fast dev run", ", 3 batches: a fast dev run", "")  # of the data set's name


def test_a_run_of_an_earlier_version_is_evaluated_reported_and_compared(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "run_52b31d6", tmp_path / "run")
    stored = summary_of(folder)
    for ending in ENDINGS:
        summary_of(folder, dataset=stored["dataset"] + ending)
        found = evaluated(folder).evaluation
        assert found.accuracy == stored["test_accuracy"] > 0.97
        assert found.loss == pytest.approx(stored["test_loss"], rel=1e-6)
    page, _ = write_page(folder)
    assert page.stat().st_size > 10_000
    (group,) = compared(find([str(folder)])).groups
    assert group.figures["accuracy"] == stored["test_accuracy"]


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("changes", [(), ("workers=1", "dtype=double")])
def test_a_run_of_an_earlier_version_is_resumed(changes: tuple[str, ...], command: Command, in_folder: Path) -> None:
    run = shutil.copytree(GOLDEN / "run_0171862e", in_folder / "run")
    with (run / "history.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 3}\n')  # written after the checkpoint
    assert command("resume=run", "epochs=3", *changes, task=train_job)[0] == 0
    summary = summary_of(run)
    assert (summary["epochs"], summary["workers"]) == (3, 1 if changes else 2)
    assert Run(run).columns()["epoch"] == [1, 2, 3]


def test_a_removed_setting_of_a_stored_run_is_dropped_if_it_is_ignored_or_at_its_default() -> None:
    assert translated({"data": {"shards": None, "sha256": "abc", "limit": 3}}) == {"data": {"limit": 3}}
    assert translated({"data": {"shards": 4}}) == {"data": {"shards": 4}}  # refused by the source
    assert translated({"data": {"timeout_s": float("inf")}}) == {"data": {}}
    relu = {"_target_": "cupynet.nn.Activation", "name": "relu"}
    assert translated({**relu, "slope": 0.3}) == relu


def test_renamed_settings_of_a_stored_command_line_get_their_present_names(tmp_path: Path) -> None:
    smoke_test = ["fast_dev_run=3", "accumulate=2", "+data.normalize.deviation=[0.4]", "~callbacks.progress"]
    keep(tmp_path, settings_of(), smoke_test)
    with (tmp_path / ".hydra/config.yaml").open("a") as file:
        file.write("fast_dev_run: 3\n")
    assert config.load(tmp_path).epochs == settings_of().epochs
    assert config.overrides_of(tmp_path) == ["accumulation_steps=2", "+data.normalize.std=[0.4]", "~callbacks.progress"]


def test_a_renamed_argument_in_stored_settings_gets_its_present_name_at_any_depth() -> None:
    name, schedule = "cupynet.parallel.ElasticAveraging", {"_target_": "cupynet.parallel.PostLocal", "epochs": 2}
    stored = {"synchronizer": {"_target_": name, "frequency": {**schedule, "frequency": 10}}}
    present = {"_target_": name, "averaging_frequency": {**schedule, "averaging_frequency": 10}}
    assert translated({"parallel": stored})["parallel"]["synchronizer"] == present


def test_a_moved_class_is_found_and_an_argument_of_a_users_class_keeps_its_name() -> None:
    assert translated({"_target_": "cupynet.loggers.WandB"}) == {"_target_": "cupynet.training.WandB"}
    stored = {"_target_": "mine.ParameterAveraging", "frequency": 3}
    assert translated(stored) == stored
