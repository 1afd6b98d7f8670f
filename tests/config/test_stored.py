"""A run's stored settings, read again with changes."""

from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import stored
from tests.support.refusals import data_error
from tests.support.settings import settings_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    overrides = ("workers=2", "trusted_modules=[evil]", "optimizer=sgd")
    stored.keep(tmp_path / "run", settings_of(*overrides), overrides)
    return tmp_path / "run"


def test_stored_settings_can_be_changed_and_their_trusted_modules_are_not_read(run: Path) -> None:
    settings = config.load(run, ["batch_size=512", "data.limit=10", "+optimizer.momentum=0.5"])
    assert (settings.workers, settings.batch_size, settings.data["limit"]) == (2, 512, 10)
    assert settings.optimizer["_target_"] == "cupynet.optim.SGD" and settings.optimizer["momentum"] == 0.5
    other = config.load(str(run), ["parallel.averaging_frequency=7", "parallel=averaging"])
    assert other.parallel.synchronizer["averaging_frequency"] == 7
    assert other.trusted_modules == []
    for trusting in (config.load(run, (), ["mine"]), config.load(run, ["trusted_modules=[mine]"])):
        assert trusting.trusted_modules == ["mine"]


def test_a_stored_run_keeps_its_command_line_and_the_fallback_of_its_data(tmp_path: Path) -> None:
    for overrides, fallback in ((["data=mnist"], None), ([], "auto")):
        folder = tmp_path / f"run-{fallback}"
        stored.keep(folder, settings_of(*overrides), overrides)
        assert config.load(folder).data["fallback"] == fallback and config.overrides_of(folder) == overrides
    assert config.load(folder, ["data.fallback=synthetic"]).data["fallback"] == "synthetic"
    assert config.load(folder, ["data=mnist"]).data["fallback"] is None


def test_other_files_of_a_group_replace_its_changed_settings_in_the_command_of_a_resumed_run(tmp_path: Path) -> None:
    overrides = ["callbacks=weight_average", "callbacks.weight_average.decay=0.9", "optimizer.momentum=0.5", "epochs=1"]
    stored.keep(tmp_path, settings_of(*overrides), overrides)
    changed = stored.changed_overrides(tmp_path, ["callbacks=default", "epochs=2"])
    assert changed == ["optimizer.momentum=0.5", "callbacks=default", "epochs=2"]
    settings_of(*changed)
    merged = stored.changed_overrides(tmp_path, ["callbacks={progress: null}"])
    assert merged == [*overrides, "callbacks={progress: null}"]


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"", b"workers: 2\nseed: 1\n"], ids=["bytes", "empty", "cut"])
def test_a_damaged_file_of_stored_settings_is_refused(damage: bytes, run: Path) -> None:
    path = run / ".hydra" / "config.yaml"
    path.write_bytes(damage)
    with data_error(path):
        config.load(run)


def test_settings_that_a_resume_command_must_repeat_are_enough_to_resume(tmp_path: Path) -> None:
    places = ["callbacks.history.path='/tmp/a b, {c}'", "+callbacks.mine={_target_:cupynet.training.MLflow}"]
    settings = settings_of("callbacks=[mlflow,wandb]", "callbacks.wandb.mode=online", "trusted_modules=[a,b]", *places)
    stored.keep(tmp_path, settings)
    again = config.not_stored(settings, tmp_path)
    assert {"callbacks.mlflow.uri=null", "+callbacks.mine.uri=null", "callbacks.wandb.mode=online"} < {*again}
    loaded = config.load(tmp_path, again)
    config.check_outputs(loaded, tmp_path, again)
    assert loaded.callbacks.pop("mine") == {**settings.callbacks.pop("mine"), "uri": None} and loaded == settings
    assert config.not_stored(settings_of(), tmp_path) == []
