"""The stored settings of a run, read again with changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import stored
from cupynet.core.errors import ConfigError, DataError
from tests.support.settings import settings_of


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    overrides = ("workers=2", "trusted_modules=[evil]", "optimizer=sgd")
    stored.keep(tmp_path / "run", settings_of(*overrides), overrides)
    return tmp_path / "run"


def test_load(run_folder: Path) -> None:
    settings = config.load(run_folder, ["batch_size=512", "data.limit=10", "+optimizer.momentum=0.5"], ["mine"])
    assert (settings.workers, settings.batch_size, settings.data["limit"]) == (2, 512, 10)
    assert settings.parallel.synchronizer["averaging_frequency"] == settings.parallel.averaging_frequency == 3
    other = config.load(str(run_folder), ["parallel.averaging_frequency=7", "parallel=averaging"])
    assert other.parallel.synchronizer["averaging_frequency"] == 7 and other.trusted_modules == []
    assert settings.optimizer["_target_"] == "cupynet.optim.SGD" and settings.optimizer["momentum"] == 0.5
    assert settings.trusted_modules == ["mine"]
    assert config.load(run_folder, ["trusted_modules=[mine]"]).trusted_modules == ["mine"]


def test_load_checks_settings_by_the_same_rules(run_folder: Path) -> None:
    for override, said in {
        "workrs=4": "did you mean 'workers'",
        "workers=0": "workers=0",
        "+foo=1": "foo",
        "workers=[1": "workers=[1",
        "model.layers.conv2.kernal=5": "did you mean 'model.layers.conv2.kernel'",
        "data=nothing": "mnist",
    }.items():
        with pytest.raises(ConfigError) as caught:
            config.load(run_folder, [override])
        assert said in str(caught.value)


def test_load_refuses_a_folder_without_a_run(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run: there is no"):
        config.load(tmp_path / "nowhere")
    path = run_folder / ".hydra" / "config.yaml"
    text = path.read_text()
    for damage, error in (("[", DataError), ("- 1\n", DataError), ("", ConfigError), (text + "foo: 1\n", ConfigError)):
        path.write_text(damage)
        with pytest.raises(error):
            config.load(run_folder)
    for old, new, line in (
        ("report_every_iterations: 50\n", "report_evry: 50\n", "did you mean 'report_every_iterations'"),
        ("  timeout_s: 300.0\n", "  timeout: 300.0\n", "did you mean 'parallel.timeout_s'"),
        ("workers: 2\n", "workers: two\n", "workers"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=line) as caught:
            config.load(run_folder)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    path.write_text(re.sub(r"  synchronizer:\n(    .*\n)+", "", text))
    with pytest.raises(ConfigError, match="^parallel.synchronizer: "):
        config.load(run_folder)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        config.load(run_folder)


def test_what_must_be_typed_again_is_enough_to_resume(tmp_path: Path) -> None:
    places = ["callbacks.history.path='/tmp/a b, {c}'", "+callbacks.mine={_target_:cupynet.training.MLflow}"]
    settings = settings_of("callbacks=[mlflow,wandb]", "callbacks.wandb.mode=online", "trusted_modules=[a,b]", *places)
    stored.keep(tmp_path, settings)
    again = config.not_stored(settings, tmp_path)
    assert {"callbacks.mlflow.uri=null", "+callbacks.mine.uri=null", "callbacks.wandb.mode=online"} < {*again}
    loaded = config.load(tmp_path, again)
    config.check_outputs(loaded.callbacks, tmp_path, again, loaded.trusted_modules)
    assert loaded.callbacks.pop("mine") == {**settings.callbacks.pop("mine"), "uri": None} and loaded == settings
    assert config.not_stored(settings_of(), tmp_path) == []


def test_a_reloaded_run_keeps_its_overrides(tmp_path: Path) -> None:
    for overrides, fallback in ((["data=mnist"], None), ([], "auto")):
        folder = tmp_path / f"run-{fallback}"
        stored.keep(folder, settings_of(*overrides), overrides)
        assert config.load(folder).data["fallback"] == fallback and config.overrides_of(folder) == overrides
    assert config.load(folder, ["data.fallback=synthetic"]).data["fallback"] == "synthetic"
    assert config.load(folder, ["data=mnist"]).data["fallback"] is None
