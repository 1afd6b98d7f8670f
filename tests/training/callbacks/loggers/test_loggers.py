"""Loggers: their files equal history.jsonl, resumed runs continue them, and a failing logger never ends a run."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from cupynet.commands import train
from cupynet.config.stored import check_outputs
from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.runs.run import Run
from cupynet.training import Checkpoint, History, NonFinite, ParallelWrapper, StopReason
from cupynet.training.callbacks.loggers import Logger, MLflow, TensorBoard, WandB, base, mlflow
from tests.support.logger_files import (
    Figures,
    expected,
    mlflow_run,
    tensorboard_events,
    tensorboard_figures,
    wandb_figures,
    wandb_records,
)
from tests.support.mpi import NO_MPI, under_mpiexec
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import At, StopAfter, small_dataset, small_model

MISSING = [name for name in ("tensorboardX", "mlflow", "sqlalchemy", "wandb") if find_spec(name) is None]
QUICK = ["data=synthetic", "data.train=200", "data.test=100", "model=mlp", "epochs=1", "backend=numpy"]
pytestmark = pytest.mark.skipif(
    bool(MISSING) and "CUPYNET_TEST_ALL" not in os.environ, reason=f"{', '.join(MISSING)} not installed"
)
DATA, TEST = small_dataset(96), small_dataset(30, seed=1)
SETTINGS = {"workers": 2, "resume": None, "optimizer": {"learning_rate": 0.05, "name": "nesterov"}, "devices": [0, 1]}
RETRIES, TIMEOUT = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
KINDS = ("tensorboard", "mlflow", "wandb")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store: creating one takes seconds, copying it no time."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    from mlflow.tracking import MlflowClient

    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy", category=DeprecationWarning)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri = f"sqlite:///{path}"
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments()
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> str:
    copy = tmp_path / "runs.db"
    copy.write_bytes(made.read_bytes())
    return f"sqlite:///{copy}"


def logger(kind: str, store: str, **options: Any) -> Logger:
    if kind == "tensorboard":
        return TensorBoard()
    return MLflow(store, **options) if kind == "mlflow" else WandB(**options)


def figures(kind: str, folder: Path, store: str) -> Figures:
    if kind == "tensorboard":
        return tensorboard_figures(folder / "tensorboard")
    if kind == "mlflow":
        return mlflow_run(store)[1]
    found: Figures = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for key, values in wandb_figures(path).items():
            found.setdefault(key, []).extend(values)
    return found


def fit(run: Run, *callbacks: Any, epochs: int = 2, restore: Path | None = None, workers: int = 2) -> ParallelWrapper:
    wrapper = ParallelWrapper(
        small_model(), workers, run=run, report_every=5, optimizer=Nesterov(0.05), callbacks=[History(), *callbacks]
    )
    with wrapper:
        if restore is not None:
            wrapper.restore(restore)
        wrapper.fit(Loader(DATA, 4, seed=3), epochs, evaluate_on=Loader(TEST, 8, shuffle=False))
    return wrapper


def check(found: Figures, run: Run, *, exact: bool) -> None:
    """Check that every figure of history.jsonl is there once, with only results and finer evaluations besides."""
    wanted = expected(run.history())
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=0 if exact else 1e-6, abs=0), key
    others = {name for name, _ in found.keys() - wanted.keys()}
    assert others <= {f"test/{name}" for name in ("top_n_accuracy", "precision", "recall", "f1")}


def hyperparameters(folder: Path) -> Any:
    """The hyperparameters in TensorBoard's event file, by name."""
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    texts = [value for event in tensorboard_events(folder / "tensorboard") for value in event.summary.value]
    (content,) = [value.metadata.plugin_data.content for value in texts if value.tag.endswith("session_start_info")]
    return HParamsPluginData.FromString(content).session_start_info.hparams


@pytest.fixture(scope="module")
def trained(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """One run with all three."""
    folder = tmp_path_factory.mktemp("run")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    (folder / "mlflow.db").write_bytes(made.read_bytes())
    run = Run(folder, SETTINGS)
    fit(run, TensorBoard(), MLflow(store), WandB())
    return run, store


@pytest.mark.parametrize("kind", KINDS)
def test_logged_figures_equal_the_history(trained: tuple[Run, str], kind: str) -> None:
    run, store = trained
    found = figures(kind, run.folder, store)
    check(found, run, exact=kind != "tensorboard")  # which keeps 32 bits of each
    assert len(found["train/loss", 5]) == 1 and found["epoch/epoch", 24] == [2]


def test_hyperparameters_are_flat(trained: tuple[Run, str]) -> None:
    run, store = trained
    wanted = {"workers": 2, "resume": "null", "optimizer.learning_rate": 0.05, "optimizer.name": "nesterov"}
    wanted |= {"devices": "[0, 1]"}
    assert base.hyperparameters(SETTINGS) == wanted
    assert mlflow_run(store)[0].data.params == {name: str(value) for name, value in wanted.items()}
    (path,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    (made,) = [record.run for record in wandb_records(path) if record.HasField("run")]
    config = {item.key or ".".join(item.nested_key): item.value_json for item in made.config.update}
    assert config["optimizer.learning_rate"] == "0.05" and config["optimizer.name"] == '"nesterov"'
    there = hyperparameters(run.folder)
    texts = [value for event in tensorboard_events(run.folder / "tensorboard") for value in event.summary.value]
    assert there["optimizer.learning_rate"].number_value == 0.05 and there["resume"].string_value == "null"
    assert any(value.tag.endswith("session_end_info") for value in texts)


def test_the_end_of_a_run(trained: tuple[Run, str]) -> None:
    run, store = trained
    there, _ = mlflow_run(store)
    assert (there.info.status, there.info.run_name) == ("FINISHED", run.folder.name)
    assert there.data.tags["run_folder"] == str(run.folder)
    (path,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(path)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_its_logs(tmp_path: Path, store: str, kind: str) -> None:
    """Killed after iteration 22, resumed from 15: figures logged in between are there once, or count once."""
    run = Run.of(tmp_path / "run")

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    saves = Checkpoint(every_epochs=100, every_iterations=15)
    with pytest.raises(Killed):
        fit(run, logger(kind, store), saves, At(22, kill))
    assert ("train/loss", 20) in figures(kind, run.folder, store)
    fit(run, logger(kind, store), restore=run.checkpoints_path)
    found = figures(kind, run.folder, store)
    if kind == "wandb":  # two files of one run; the second has the repeated figures
        assert len({path.name for path in run.folder.glob("wandb/offline-run-*/*.wandb")}) == 1
    if kind == "mlflow":  # it has the figures at iteration 20 of both
        assert len(found["train/loss", 20]) == 2
        assert mlflow_run(store)[0].info.status == "FINISHED"
    if kind != "tensorboard":
        found = {key: values[-1:] for key, values in found.items()}
    check(found, run, exact=kind == "wandb")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_writer_never_ends_a_run(
    tmp_path: Path, store: str, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and no further writes."""
    run, tried = Run(tmp_path / "run"), []
    run.folder.mkdir()

    def full(*given: Any, **named: Any) -> None:
        tried.append(given)
        raise OSError(28, "No space left on device")

    places = {
        "tensorboard": ("tensorboardX.event_file_writer", "EventsWriter", "flush"),
        "mlflow": ("mlflow.tracking", "MlflowClient", "log_batch"),
        "wandb": ("wandb.sdk.wandb_run", "Run", "log"),
    }
    module, cls, method = places[kind]
    with caplog.at_level(logging.WARNING, "cupynet"):
        own = logger(kind, store)
        monkeypatch.setattr(getattr(import_module(module), cls), method, full)
        wrapper = fit(run, own)
    assert wrapper.model is not None and run.history()[-1]["epoch"] == 2
    (record,) = [each for each in caplog.records if each.name.startswith("cupynet.training.callbacks.loggers")]
    assert record.levelname == "WARNING" and len(tried) == 1


def test_an_unwritable_folder_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At once: MLflow by itself would try for minutes to open its file."""
    (tmp_path / "file").write_text("")
    run = Run.of(tmp_path / "run")
    broken = [MLflow(f"sqlite:///{tmp_path}/no/such/folder/x.db"), TensorBoard(tmp_path / "file")]
    with caplog.at_level(logging.WARNING, "cupynet"):
        fit(run, *broken, epochs=1)
    messages = [
        each.getMessage() for each in caplog.records if each.name.startswith("cupynet.training.callbacks.loggers")
    ]
    assert [text.partition(" ")[0] for text in messages] == ["MLflow", "TensorBoard"]


def test_failed_and_killed_runs_are_marked(tmp_path: Path, store: str) -> None:
    run = Run.of(tmp_path / "diverged")
    callbacks = [MLflow(store, "diverged"), NonFinite()]
    wrapper = ParallelWrapper(small_model(), 1, run=run, optimizer=Nesterov(1e200), callbacks=callbacks)
    with wrapper, pytest.raises(DivergedError):
        wrapper.fit(DATA, 2, batch_size=8)
    assert mlflow_run(store, "diverged")[0].info.status == "FAILED"
    signal = StopAfter(3, text="SIGTERM", reason=StopReason.SIGNAL)
    fit(Run.of(tmp_path / "killed"), MLflow(store, "killed"), signal)
    assert mlflow_run(store, "killed")[0].info.status == "KILLED"


def test_artifacts_and_names(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts of a store of SQLite
    run = Run.of(tmp_path / "run")
    fit(run, MLflow(store, "named", "first", artifacts=True), epochs=1)
    there, _ = mlflow_run(store, "named")
    assert there.info.run_name == "first"
    assert [path.name for path in tmp_path.glob("mlruns/**/artifacts/*")] == ["history.jsonl"]


def test_in_python_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that the trainer knows stand in for settings."""
    monkeypatch.chdir(tmp_path)
    with ParallelWrapper(small_model(), 2, callbacks=[TensorBoard()], report_every=5) as wrapper:
        wrapper.fit(DATA, 1, batch_size=4)
        wrapper.fit(DATA, 1, batch_size=4)
    found = tensorboard_figures(tmp_path / "tensorboard")
    assert [at for name, at in found if name == "train/loss"] == [5, 10, 15, 20]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_an_open_log_keeps_its_identity() -> None:
    """A checkpoint of another run may be restored between two fits."""
    written = []

    class Named(Logger):
        package = "json"

        def _begin(self, hyperparameters: dict[str, Any], iteration: int) -> None:
            self.identity = "this"

        def _write(self, iteration: int, figures: dict[str, float]) -> None:
            written.append(self.identity)

        def _end(self, status: str, results: dict[str, float]) -> None:
            pass

    named = Named()
    with ParallelWrapper(small_model(), 1, callbacks=[named]) as wrapper:
        wrapper.fit(DATA, 1, batch_size=4)
        named.restore({"identity": "other"})
        wrapper.fit(DATA, 1, batch_size=4)
        assert set(written) == {"this"}


def test_nothing_is_written_before_a_fit(tmp_path: Path, store: str) -> None:
    """All epochs may be complete already: nothing is opened before a fit."""
    with ParallelWrapper(
        small_model(), 1, run=tmp_path / "run", callbacks=[TensorBoard(), WandB(), MLflow(store)]
    ) as w:
        w.evaluate(TEST)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboardX"), (MLflow, "mlflow"), (WandB, "wandb")])
def test_a_missing_package(kind: type[Logger], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{base.__name__}.find_spec", lambda name: None if name == package else "there")
    with refused(""):
        kind()


def test_an_unresponsive_server_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other workers wait for rank 0 meanwhile, by default 300 s."""
    assert int(mlflow.PATIENCE[RETRIES]) * int(mlflow.PATIENCE[TIMEOUT]) < 60
    monkeypatch.setattr(mlflow, "PATIENCE", {RETRIES: "0", TIMEOUT: "1"})
    for name in (RETRIES, TIMEOUT):
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as deaf, caplog.at_level(logging.WARNING, "cupynet"):
        began = time.monotonic()
        fit(Run.of(tmp_path / "run"), MLflow(f"http://127.0.0.1:{deaf.getsockname()[1]}"), epochs=1)
    assert time.monotonic() - began < 30
    (record,) = [each for each in caplog.records if each.name.startswith("cupynet.training.callbacks.loggers")]
    assert record.levelname == "WARNING"


def test_wandb_without_a_login_stays_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online without a login: the file is kept here, and nothing is sent."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with caplog.at_level(logging.WARNING, "cupynet"):
        fit(Run.of(tmp_path / "run"), WandB(mode="online"), epochs=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))) == 1
    with refused("mode"):
        WandB(mode="onlin")


def test_a_stored_run_cannot_choose_where_figures_are_sent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for part in ({"uri": "http://elsewhere"}, {"mode": "online"}):
        (key,) = part
        with refused(f"callbacks.mine.{key}"):
            check_outputs({"mine": part}, run, ())
        check_outputs({"mine": part}, run, (f"callbacks.mine.{key}=x",))
    check_outputs({"mine": {"uri": None, "mode": "offline", "path": None}, "none": None}, run, ())


def test_loggers_combine_with_other_callbacks() -> None:
    for chosen in ("[early_stopping,tensorboard,mlflow]", "[mlflow,tensorboard,early_stopping]"):
        found = settings_of(f"callbacks={chosen}", "callbacks.mlflow.experiment=mine").callbacks
        assert {"history", "checkpoint", "early_stopping", "tensorboard", "mlflow"} <= set(found)
        assert found["early_stopping"]["patience"] == 5 and found["mlflow"]["experiment"] == "mine"


def test_a_run_of_the_command_logs_its_settings_and_results(tmp_path: Path) -> None:
    """Settings are hyperparameters, the summary is the result."""
    train.train(train.prepare(settings_of(*QUICK, "callbacks=[default,tensorboard]", "seed=2")), tmp_path)
    found, summary = tensorboard_figures(tmp_path / "tensorboard"), Run(tmp_path).summary()
    check({key: v for key, v in found.items() if not key[0].startswith("result/")}, Run(tmp_path), exact=False)
    results = {name: value for (name, _), value in found.items() if name.startswith("result/")}
    assert results["result/test_accuracy"] == pytest.approx([summary.scores.test_accuracy])
    assert results["result/wall_s"] == pytest.approx([summary.cost.wall_s])
    assert hyperparameters(tmp_path)["seed"].number_value == 2


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_rank_0_alone_logs(tmp_path: Path) -> None:
    """And a profile has the tracks of all ranks."""
    own = ["parallel.launcher=mpi", "callbacks=tensorboard", "profile=true", "hydra.run.dir=run"]
    done = under_mpiexec(2, "-m", "cupynet", "train", *QUICK, *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    assert len(list((folder / "tensorboard").iterdir())) == 1
    found = tensorboard_figures(folder / "tensorboard")
    check({key: v for key, v in found.items() if not key[0].startswith("result/")}, Run(folder), exact=False)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_jobs_that_start_together_create_one_store(tmp_path, monkeypatch):
    """MLflow fails if two processes create the tables of a file at once, so they take turns."""
    path, seen = tmp_path / "mlflow.db", []

    def create(self, uri, hyperparameters):
        taken = pytest.raises(Timeout)
        with taken, FileLock(tmp_path / ".mlflow.db.lock", thread_local=False).acquire(timeout=0):
            pass
        seen.append(uri)

    monkeypatch.setattr(MLflow, "_create", create)
    MLflow(f"sqlite:///{path}")._begin({}, 0)
    assert seen == [f"sqlite:///{path}"] and list(tmp_path.iterdir()) == [path]
