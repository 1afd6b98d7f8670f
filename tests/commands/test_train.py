"""`cupynet train` as a user types it: its files, its errors, and its exit codes."""

import json
import os
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from safetensors.numpy import load_file

from cupynet.commands import evaluate, train
from cupynet.core.errors import DivergedError
from cupynet.data import Synthetic
from cupynet.runs.run import Run
from cupynet.training import Trainer
from tests.support.commands import QUICK, ROOT, SMALL, Call, run, run_folder, summary_of
from tests.support.mpi import NO_MPI
from tests.support.refusals import data_error
from tests.support.resumed_runs import resumed, same, trained
from tests.support.settings import settings_of
from tests.support.training import On
from tests.support.user_files import digits, write_idx

TINY = [*QUICK, *SMALL]
FINISHED = [*TINY, "workers=2", "epochs=2", "log_every=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return the folder of a run that was trained in a new process, and the output of the command."""
    folder = tmp_path_factory.mktemp("finished")
    stdout, stderr = run(folder, *FINISHED, PYTHONHASHSEED="1")
    return run_folder(folder), stdout, stderr


def test_a_run_writes_the_files_that_other_commands_read(finished: tuple[Path, str, str]) -> None:
    folder, stdout, stderr = finished
    results = {"history.jsonl", "summary.json", "weights.safetensors", "examples.safetensors"}
    assert {p.name for p in folder.iterdir()} == {".hydra", "train.log", "started.json", "checkpoints", *results}
    assert stderr == "" and f"outputs/{folder.parent.name}/{folder.name}\n" in stdout
    summary = summary_of(folder)
    expected = {"dataset": "synthetic", "fallback": False, "backend": "numba", "devices": ["cpu", "cpu"]}
    expected |= {"dtype": "float", "workers": 2, "seed": 123, "epochs": 2, "images": 1200, "stopped_by": None}
    assert {key: summary[key] for key in expected} == expected
    assert all(summary[key] > 0 for key in ("images_per_s", "wall_s", "train_s", "test_loss"))
    assert summary["environment"]["blas"][0]["num_threads"] >= 1


def test_examples_safetensors_has_the_images_of_the_mistakes(finished: tuple[Path, str, str]) -> None:
    mistakes = [each["sample"] for each in summary_of(finished[0])["test"]["mistakes"]]
    images = load_file(finished[0] / "examples.safetensors")["images"]
    np.testing.assert_array_equal(images, Synthetic(600, 200).load().test.images[mistakes])


def test_a_run_that_has_not_learned_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps are far too large, but clipping keeps them finite, so nothing else would reveal it."""
    trained(tmp_path / "bad", *TINY, "workers=1", "optimizer.learning_rate=10")
    assert sum(each.levelname == "WARNING" for each in caplog.records) == 1
    caplog.clear()
    trained(tmp_path / "good", *QUICK, "workers=1")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_diverged_run_keeps_its_best_weights_and_records_exit_code_3(tmp_path: Path, call: Call) -> None:
    def diverge(trainer: Trainer) -> None:
        if (trainer.rank, trainer.iteration) == (1, 25):
            trainer.params.master[0] = np.nan

    settings = ["callbacks=early_stopping", "data.validation=200", "workers=2", "epochs=4", "data.train=840"]
    with pytest.raises(DivergedError) as caught:
        trained(tmp_path, *TINY, *settings, callbacks=[On("on_iteration_end", diverge, every_rank=True)])
    summary = summary_of(tmp_path)
    found = summary["early_stopping"]
    assert (found["reason"], found["best_epoch"], found["restored"]) == ("diverged", 2, True)
    assert (summary["stop_reason"], summary["epochs"], summary["test_accuracy"]) == ("diverged", 2, None)
    assert summary["stopped_by"] == str(caught.value)
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert failed["exit_code"] == 3 and "conv1" in failed["error"]
    assert all(np.isfinite(each).all() for each in load_file(tmp_path / "weights.safetensors").values())
    assert call(evaluate.main, tmp_path).code == 0


def test_a_job_of_a_sweep_is_scored_by_its_validation_accuracy(tmp_path: Path) -> None:
    settings = settings_of(*QUICK, "model=mlp", "data.validation=50", "workers=1")
    value = train.train(train.prepare(settings), tmp_path)
    scores = Run(tmp_path).summary().scores
    assert value == scores.validation_accuracy != scores.test_accuracy


@pytest.mark.parametrize("experiment", [p.stem for p in sorted((ROOT / "conf/experiment").glob("*.yaml"))])
def test_every_experiment_trains(experiment: str, tmp_path: Path) -> None:
    data = ["data=synthetic", "data.train=60", "data.test=20", "data.validation=10"]
    settings = [f"experiment={experiment}", *data, "epochs=1", "batch_size=8"]
    if "launcher: mpi" not in (ROOT / "conf/experiment" / f"{experiment}.yaml").read_text():
        trained(tmp_path, *settings)
    elif NO_MPI:
        pytest.skip(NO_MPI)
    else:
        run(tmp_path, *settings, f"hydra.run.dir={tmp_path}")
    summary = summary_of(tmp_path)
    assert summary["images"] == 50 and summary["test_accuracy"] is not None


def test_missing_mnist_is_replaced_by_synthetic_digits_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    nowhere = ["data=mnist", f"data.folder={tmp_path / 'nowhere'}", "data.fallback=synthetic", "data.limit=200"]
    trained(tmp_path, *nowhere, *SMALL, "epochs=1", "workers=1")
    warning, *_ = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "synthetic digits" in warning and summary_of(tmp_path)["fallback"] is True


def test_without_files_and_network_mnist_that_was_asked_for_exits_with_65(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    monkeypatch.delenv("CUPYNET_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path / "nowhere")
    with data_error(tmp_path / "nowhere"):
        trained(tmp_path / "run", "data=mnist", *SMALL, "epochs=1", "workers=1")
    assert not (tmp_path / "run" / "started.json").exists()


def test_a_damaged_data_file_exits_with_65_and_is_named(tmp_path: Path) -> None:
    damaged = write_idx(tmp_path / "idx", digits(60, 20)) / "train-images-idx3-ubyte.gz"
    os.truncate(damaged, 60)
    _, stderr = run(tmp_path, "data=idx", "data.folder=idx", "model=mlp", "batch_size=16", "epochs=1", code=65)
    assert str(damaged.relative_to(tmp_path)) in stderr and stderr.count("\n") == 1
    assert not [*tmp_path.glob("outputs/*/*/summary.json")]


# tests/core/test_signals.py and tests/config/test_resume.py test runs that a signal ends while they train
SIGNALLING = """
import os, signal, time
from cupynet.data import Synthetic
from cupynet.nn import Layer

class Slow(Synthetic):
    def load(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

class Late(Layer):
    sent = False

    def build(self, input, params, backend):
        return input

    def forward(self, x, context):
        if not context.train and not Late.sent:  # the first evaluation comes after the last average
            Late.sent = True
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the main thread has handled the signal
        return x, lambda dy: dy
"""


@pytest.fixture
def signalling(tmp_path: Path) -> list[str]:
    """Write a module with the classes above, and return settings that trust it."""
    (tmp_path / "signalling.py").write_text(SIGNALLING)
    return [*TINY, "trusted_modules=[signalling]"]


def test_a_signal_while_data_are_loaded_ends_a_run_at_once_with_143(signalling: list[str], tmp_path: Path) -> None:
    _, stderr = run(tmp_path, *signalling, "data._target_=signalling.Slow", "hydra.run.dir=run", code=143)
    assert "SIGUSR1" in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_signal_in_the_last_evaluation_keeps_results_and_ends_a_sweep(signalling: list[str], tmp_path: Path) -> None:
    part = "+model.layers={late:{_target_:signalling.Late}}"
    stdout, _ = run(tmp_path, "-m", *signalling, part, "workers=1,2", code=143)
    (summary,) = tmp_path.glob("outputs/sweeps/*/*/*/summary.json")
    assert json.loads(summary.read_text())["test_accuracy"] is not None
    assert "] job 0" in stdout and "] job 1" not in stdout
    (line,) = re.findall(r"^not started: job 1: cupynet train (.*)$", stdout, re.MULTILINE)
    assert {*signalling, part, "workers=2"} <= {*shlex.split(line)}


@pytest.mark.slow
@pytest.mark.skipif("CUPYNET_DATA" not in os.environ, reason="needs MNIST below CUPYNET_DATA")
def test_mnist_reaches_99_percent(tmp_path: Path) -> None:
    data = str(Path(os.environ["CUPYNET_DATA"]).resolve())
    accuracies = []
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run(folder, f"seed={seed}", "workers=2", "evaluate_every_epochs=10", "data.fallback=null", CUPYNET_DATA=data)
        accuracies.append(summary_of(run_folder(folder))["test_accuracy"])
    assert sum(accuracies) / 3 >= 0.99 and min(accuracies) >= 0.989


def test_runs_with_the_same_settings_are_bit_identical(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    trained(tmp_path, *FINISHED)
    assert same(finished[0], tmp_path)
    assert Counter(row["kind"] for row in Run(tmp_path).history()) == {"epoch": 2, "report": 5}


def test_a_run_that_started_from_weights_is_resumed_without_their_file(tmp_path: Path) -> None:
    trained(tmp_path / "first", *TINY, "workers=1")
    first = load_file(tmp_path / "first" / "weights.safetensors")
    fine = [f"weights={tmp_path / 'first'}", "freeze=[conv*]", "model.layers.dense1.units=8"]
    fine.append("learning_rate_factors={output.*:0.1,output.bias:0}")
    trained(tmp_path / "second", *TINY, "workers=1", *fine)
    shutil.rmtree(tmp_path / "first")
    resumed(tmp_path / "second", "epochs=2")
    second = load_file(tmp_path / "second" / "weights.safetensors")
    assert summary_of(tmp_path / "second")["epochs"] == 2
    equal = [name for name in first if first[name].shape == second[name].shape and (first[name] == second[name]).all()]
    assert equal == ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight", "output.bias"]
