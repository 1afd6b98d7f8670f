"""Loggers: they log the figures of history.jsonl, resumed runs continue the logs, and no failing logger ends a run."""

import logging
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cupynet import Dense, DivergedError, Loader, Model, Nesterov, Run
from cupynet.commands import train
from cupynet.config.overrides import quoted
from cupynet.training import Callback, Checkpoint, HistoryWriter, ParallelWrapper, StopReason
from cupynet.training.callbacks.loggers import Logger, MLflow, TensorBoard, WandB, base
from tests.support import logger_files
from tests.support.calls import watch
from tests.support.logger_files import Figures
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import At, StopAfter, small_dataset, small_model

MISSING = [name for name in ("tensorboardX", "mlflow", "sqlalchemy", "wandb") if find_spec(name) is None]
QUICK = ["data=synthetic", "data.train=200", "data.test=100", "model=mlp", "epochs=2", "backend=numpy", "seed=2"]
QUICK += ["workers=2", "batch_size=16", "log_every=5", "callbacks=[default,tensorboard,mlflow,wandb]"]
pytestmark = pytest.mark.skipif(
    bool(MISSING) and "CUPYNET_TEST_ALL" not in os.environ, reason=f"{', '.join(MISSING)} not installed"
)
DATA, TEST = small_dataset(96), small_dataset(30, seed=1)
every_kind = pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])


GIVEN_TO_WANDB: list[tuple[Path, dict[str, Any]]] = []  # the folder of a run, and a row


@pytest.fixture(scope="module", autouse=True)
def watched() -> Iterator[None]:
    from wandb.sdk import wandb_run

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, wandb_run.Run, "log", lambda _, run, row: GIVEN_TO_WANDB.append((Path(run.dir), row)))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty MLflow store: creating one takes seconds, copying it no time."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    from mlflow.tracking import MlflowClient

    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy", category=DeprecationWarning)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri = f"sqlite:///{path}"
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments()
    return path


def store_in(folder: Path, made: Path) -> str:
    (folder / "runs.db").write_bytes(made.read_bytes())
    return f"sqlite:///{folder / 'runs.db'}"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> str:
    return store_in(tmp_path, made)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.of(tmp_path / "run")


def logger(kind: str, store: str) -> Logger:
    return MLflow(store) if kind == "mlflow" else TensorBoard() if kind == "tensorboard" else WandB()


def figures(kind: str, folder: Path, store: str) -> Figures:
    if kind == "tensorboard":
        return logger_files.tensorboard_figures(folder / "tensorboard")
    if kind == "mlflow":
        return logger_files.mlflow_run(store)[1]
    found: Figures = {}
    for path, row in GIVEN_TO_WANDB:
        for name in row.keys() - {"iteration"} if path.is_relative_to(folder) else ():
            found.setdefault((name, row["iteration"]), []).append(row[name])
    return found


def fit(run: Run, *callbacks: Callback, epochs: int = 2, restore: Path | None = None) -> None:
    given = [HistoryWriter(), *callbacks]
    with ParallelWrapper(small_model(), 2, run=run, log_every=5, optimizer=Nesterov(0.05), callbacks=given) as wrapper:
        if restore is not None:
            wrapper.restore(restore)
        wrapper.fit(Loader(DATA, 4, seed=3), epochs=epochs, evaluate_on=Loader(TEST, 8, shuffle=False))


def check(found: Figures, run: Run, *, exact: bool) -> None:
    """Check that every figure of history.jsonl was logged once, and otherwise only results and evaluations."""
    wanted = logger_files.expected(run.history())
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=0 if exact else 1e-6, abs=0), key
    others = {name for name, _ in found.keys() - wanted.keys() if not name.startswith("result/")}
    assert others <= {f"test/{name}" for name in ("top_n_accuracy", "precision", "recall", "f1")}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the levels of the loggers' log records."""
    package = base.__name__.rpartition(".")[0]
    return [record.levelname for record in caplog.records if record.name.startswith(package)]


@pytest.fixture(scope="module")
def trained(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """Return a run of the command with all three loggers, and its MLflow store."""
    folder = tmp_path_factory.mktemp("run")
    store = store_in(folder, made)
    train.train(train.prepare(settings_of(*QUICK, f"callbacks.mlflow.uri={quoted(store)}")), folder)
    return Run(folder), store


@every_kind
def test_logged_figures_equal_the_history(trained: tuple[Run, str], kind: str) -> None:
    run, store = trained
    found = figures(kind, run.folder, store)
    check(found, run, exact=kind != "tensorboard")  # TensorBoard stores 32-bit floats
    assert len(found["train/loss", 5]) == 1 and found["epoch/epoch", 14] == [2]
    if kind != "wandb":  # which has the results in its summary
        assert found["result/test_accuracy", 14] == pytest.approx([run.summary().scores.test_accuracy])
        assert found["result/wall_s", 14] == pytest.approx([run.summary().cost.wall_s])


def test_logs_have_flat_hyperparameters_the_status_and_the_name_of_the_run(trained: tuple[Run, str]) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    run, store = trained
    there, _ = logger_files.mlflow_run(store)
    assert there.data.params.items() >= {"seed": "2", "resume": "null", "data.train": "200"}.items()
    assert (there.info.status, there.info.run_name) == ("FINISHED", run.folder.name)
    assert there.data.tags["run_folder"] == str(run.folder)
    events = logger_files.tensorboard_events(run.folder / "tensorboard")
    values = [value for event in events for value in event.summary.value]
    (start,) = [value.metadata.plugin_data.content for value in values if value.tag.endswith("session_start_info")]
    hyperparameters = HParamsPluginData.FromString(start).session_start_info.hparams
    assert hyperparameters["seed"].number_value == 2 and hyperparameters["resume"].string_value == "null"


@every_kind
def test_a_resumed_run_continues_its_logs(run: Run, store: str, kind: str) -> None:
    """A run killed after iteration 22 resumes from 15: figures in between are logged once, or count once."""

    def kill() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(run, logger(kind, store), Checkpoint(every_epochs=100, every_iterations=15), At(22, kill))
    assert ("train/loss", 20) in figures(kind, run.folder, store)
    fit(run, logger(kind, store), restore=run.checkpoints_path)
    found = figures(kind, run.folder, store)
    if kind == "wandb":  # two files of one run; the second one repeats figures
        assert len({path.name for path in run.folder.glob("wandb/offline-run-*/*.wandb")}) == 1
    if kind == "mlflow":  # one run, with both figures at iteration 20
        assert len(found["train/loss", 20]) == 2
    if kind != "tensorboard":
        found = {key: values[-1:] for key, values in found.items()}
    check(found, run, exact=kind == "wandb")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("tensorboard", "tensorboardX.event_file_writer.EventsWriter.flush"),
        ("mlflow", "mlflow.tracking.MlflowClient.log_batch"),
        ("wandb", "wandb.sdk.wandb_run.Run.log"),
    ],
)
def test_a_failing_logger_does_not_end_a_run(
    run: Run, store: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    tried: list[Any] = []

    def full(*given: Any, **named: Any) -> None:
        tried.append(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(method, full)
    fit(run, logger(kind, store))
    assert run.history()[-1]["epoch"] == 2
    assert warned(caplog) == ["WARNING"] and len(tried) == 1


def test_a_logger_gives_up_an_unwritable_folder(tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Without a check, MLflow would try for minutes to open its file."""
    (tmp_path / "file").write_text("")
    fit(run, MLflow(f"sqlite:///{tmp_path}/no/such/folder/x.db"), TensorBoard(tmp_path / "file"), epochs=1)
    assert warned(caplog) == ["WARNING", "WARNING"]


def test_mlflow_marks_failed_and_killed_runs(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the artifacts of an SQLite store
    options: dict[str, Any] = {"optimizer": Nesterov(1e200), "callbacks": [MLflow(store, "diverged")]}
    wrapper = ParallelWrapper(small_model(), 1, run=tmp_path / "a", **options)
    with wrapper, pytest.raises(DivergedError):
        wrapper.fit(DATA, epochs=2, batch_size=8)
    stop = StopAfter(3, reason=StopReason.SIGNAL)
    fit(Run.of(tmp_path / "b"), MLflow(store, "killed", "named", artifacts=True), stop)
    failed, killed = (logger_files.mlflow_run(store, name)[0].info for name in ("diverged", "killed"))
    assert (failed.status, failed.run_name) == ("FAILED", "a")
    assert (killed.status, killed.run_name) == ("KILLED", "named")
    assert [path.name for path in tmp_path.glob("mlruns/**/artifacts/*")] == ["history.jsonl"]


def test_mlflow_logs_layers_and_metrics_whose_names_have_other_characters_than_it_allows(store: str) -> None:
    """Such as a layer `conv+bn`, and the function `<lambda>`."""
    model = Model({"conv+bn": Dense(3)}, (8, 8, 1), "numpy")
    metrics = [lambda labels, scores: scores.argmax(1) == labels]
    with ParallelWrapper(model, 2, callbacks=[MLflow(store)], metrics=metrics, log_every=2) as wrapper:
        wrapper.fit(DATA, batch_size=8, validation_data=TEST)
    status, found = logger_files.mlflow_run(store)
    assert status.info.status == "FINISHED"
    assert {"validation/_lambda_", "replicas/drift/conv_bn"} <= {name for name, _ in found}


def test_wandb_without_a_login_stays_offline(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    fit(run, WandB(mode="online"), epochs=1)
    assert warned(caplog) == ["WARNING"]
    assert len(list(run.folder.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_an_unknown_mode_of_wandb_is_refused() -> None:
    with refused("mode"):
        WandB(mode="onlin")
