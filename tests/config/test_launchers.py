"""Sweeps whose jobs run elsewhere, as with Hydra's launchers for joblib and Slurm; and two sweeps in one folder."""

from __future__ import annotations

import csv
import logging
import pickle
import sys
from collections.abc import Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from omegaconf import open_dict

from cupynet import config
from cupynet.config import sweep_record
from cupynet.config.process_launcher import ProcessLauncher
from cupynet.config.schema import Settings
from cupynet.core import lock
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.lock import Hold
from tests.support.compared_runs import made


def prepare(settings: Settings) -> Settings:
    if settings.seed == 4:
        raise ConfigError("is refused", "seed", "4")
    return settings


def task(settings: Settings, folder: Path) -> float | None:
    if settings.seed == 3:
        raise DataError("a picture is damaged")
    config.training_begins()
    logging.getLogger("cupynet").warning("little was learned")
    made(folder / "made", test_accuracy=settings.seed / 10)
    for path in (folder / "made").iterdir():
        if path.name != ".hydra":
            path.rename(folder / path.name)
    return settings.seed / 10


class Elsewhere(ProcessLauncher):
    """Runs each job as another process would: with a copy of the task, and without this process's state."""

    lost: tuple[int, ...] = ()  # jobs whose process is killed

    def setup(self, **how: Any) -> None:
        super().setup(**how)
        self._context, self._task = how["hydra_context"], pickle.dumps(how["task_function"])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            job = self._loader.load_sweep_config(self._config, [*overrides])
            with open_dict(job):
                job.hydra.job.num, job.hydra.job.id = number, str(number)
            here = sys.argv, [*sweep_record._ended], HydraConfig.instance().cfg
            sys.argv, sweep_record._ended[:] = ["worker"], []
            work = pickle.loads(self._task)
            if number in self.lost:
                sweep = Path(job.hydra.sweep.dir)
                sweep_record.began(sweep, sweep_record.Job(number, [*overrides], sweep / str(number), None), ())
            else:
                Context().run(  # without the running command
                    run_job, task_function=work, config=job, hydra_context=self._context,
                    job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir",
                )  # fmt: skip
            sys.argv, sweep_record._ended[:], HydraConfig.instance().cfg = here
        return []


@pytest.fixture
def sweep(in_folder: Path, minimal_conf: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """sweep(*arguments, lost=()) -> exit code, with the launcher above."""
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.cupynet_processes.Processes", Elsewhere)

    def call(*arguments: str, lost: tuple[int, ...] = ()) -> int:
        monkeypatch.setattr(Elsewhere, "lost", lost)
        monkeypatch.setattr(sys, "argv", ["train", "-m", "hydra/launcher=processes", *arguments])
        try:
            config.run(task, prepare, "config", Settings)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code
        return 0

    return call


def rows(sweep: str) -> dict[str, dict[str, str]]:
    """The rows of sweep.csv by the numbers of the jobs."""
    return {row["job"]: row for row in csv.DictReader(Path(sweep, "sweep.csv").read_text().splitlines())}


def test_jobs_of_other_processes_are_in_the_table(sweep: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("seed=1,2,5", "hydra.sweep.dir=outputs/s") == 0
    stdout, stderr = capsys.readouterr()
    assert {job: (row["seed"], row["test_accuracy"]) for job, row in rows("outputs/s").items()} == {
        "0": ("1", "0.1"),
        "1": ("2", "0.2"),
        "2": ("5", "0.5"),
    }
    assert stderr == "" and all(f"warning: job {number}: " in stdout for number in range(3))
    assert Path("outputs/latest").resolve() == Path("outputs/s").resolve()
    assert {path.name for path in Path("outputs/s").iterdir()} == {"0", "1", "2", "multirun.yaml", "sweep.csv"}


@pytest.mark.parametrize(("seeds", "code"), [("1,3", 65), ("1,4", 2), ("4,3", 2)])
def test_a_job_that_fails_elsewhere_fails_the_sweep(seeds: str, code: int, sweep: Any) -> None:
    assert sweep(f"seed={seeds}", "hydra.sweep.dir=s") == code
    codes = {"1": "0", "3": "65", "4": "2"}
    assert [row["exit_code"] for row in rows("s").values()] == [codes[each] for each in seeds.split(",")]
    assert all(bool(row["error"]) == (row["exit_code"] != "0") for row in rows("s").values())


def test_a_job_whose_process_is_killed_has_failed(sweep: Any) -> None:
    assert sweep("seed=1,2,5", "hydra.sweep.dir=s", lost=(1,)) == 1
    assert [row["exit_code"] for row in rows("s").values()] == ["0", "1", "0"] and rows("s")["1"]["error"]


def test_a_refused_job_leaves_no_folder_at_any_depth(sweep: Any) -> None:
    assert sweep("seed=4,1", "hydra.sweep.dir=s", "hydra.sweep.subdir=a${seed}/b") == 2
    assert {path.name for path in Path("s").iterdir()} == {"a1", "multirun.yaml", "sweep.csv"}


# two sweeps in one folder ---------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock."""
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_second_sweep_is_refused_before_the_folder_contains_anything(
    sweep: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s").mkdir()
    hold = Hold(Path("s"))
    try:
        assert sweep("seed=1,2", "hydra.sweep.dir=s") == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith("cupynet: s: ") and stderr.count("\n") == 1
        assert [path.name for path in Path("s").iterdir()] == ["running.json"]
    finally:
        hold.release()


@pytest.mark.usefixtures("impatient")
def test_a_sweep_locks_its_folder_while_it_runs(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*given: Any) -> None:
        locked.append(lock.at_work(Path("s")))
        began(*given)

    locked: list[bool] = []
    began = sweep_record.began
    monkeypatch.setattr(sweep_record, "began", noted)
    assert sweep("seed=1,2", "hydra.sweep.dir=s") == 0 and locked == [True, True]
    assert not lock.at_work(Path("s")) and not Path("s/running.json").exists()
    before = {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")}
    assert sweep("seed=1,2", "hydra.sweep.dir=s") == 2
    assert {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")} == before


@pytest.mark.parametrize("argument", ["hydra.launcher.jobs=0", "hydra/sweeper=nonsense"])
def test_a_refused_sweep_leaves_no_folder(argument: str, sweep: Any, in_folder: Path) -> None:
    assert sweep("seed=1,2", "hydra.sweep.dir=a/b", argument) == 2
    assert list(in_folder.iterdir()) == []


def test_the_folder_of_a_sweep_cannot_be_made(sweep: Any, in_folder: Path) -> None:
    (in_folder / "file").touch()
    assert sweep("seed=1,2", "hydra.sweep.dir=file/s") == 74
