"""Sweeps with jobs in other processes, as with Hydra's launchers for joblib and Slurm; two sweeps in one folder."""

import logging
import pickle
import sys
from collections.abc import Callable, Sequence
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
from tests.support.calls import watch
from tests.support.compared_runs import made
from tests.support.run_folders import sweep_rows

SWEEP = Path("outputs/s")


def prepare(settings: Settings) -> Settings:
    if settings.seed == 4:
        raise ConfigError("is refused", "seed", "4")
    return settings


def task(settings: Settings, folder: Path) -> float | None:
    if settings.seed == 3:
        raise DataError("a picture is damaged")
    config.deferred()()
    logging.getLogger("cupynet").warning("little was learned")
    (made(folder / "made", test_accuracy=settings.seed / 10) / "summary.json").rename(folder / "summary.json")
    return settings.seed / 10


class Elsewhere(ProcessLauncher):
    """Runs each job as another process would: with a copy of the task and without this process's state."""

    lost: tuple[int, ...] = ()  # jobs with a killed process

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
            if number in self.lost:
                sweep = Path(job.hydra.sweep.dir)
                sweep_record.began(sweep, sweep_record.Job(number, [*overrides], sweep / str(number), None), ())
            else:
                folders: Any = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
                work: Any = {"task_function": pickle.loads(self._task), "hydra_context": self._context, "config": job}
                Context().run(run_job, **work, **folders)  # an empty context, without the running command
            sys.argv, sweep_record._ended[:], HydraConfig.instance().cfg = here
        return []


@pytest.fixture
def sweep(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return sweep(*arguments, lost=()) -> exit code, which uses the launcher above and does not wait for locks."""
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.cupynet_processes.Processes", Elsewhere)
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)

    def call(*arguments: str, lost: tuple[int, ...] = ()) -> int:
        monkeypatch.setattr(Elsewhere, "lost", lost)
        typed = ["train", "-m", "hydra/launcher=processes", f"hydra.sweep.dir={SWEEP}", *arguments]
        monkeypatch.setattr(sys, "argv", typed)
        try:
            config.run(task, prepare, "config", Settings)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code
        return 0

    return call


def test_jobs_of_other_processes_are_in_the_table(
    sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=1,2,5") == 0
    stdout, stderr = capsys.readouterr()
    found = [(row["seed"], row["test_accuracy"]) for row in sweep_rows(SWEEP).values()]
    assert found == [("1", "0.1"), ("2", "0.2"), ("5", "0.5")]
    assert stderr == "" and all(f"warning: job {number}: " in stdout for number in range(3))
    assert Path("outputs/latest").resolve() == SWEEP.resolve()
    assert {path.name for path in SWEEP.iterdir()} == {"0", "1", "2", "multirun.yaml", "sweep.csv"}


def test_a_job_whose_process_is_killed_has_failed(sweep: Callable[..., int]) -> None:
    assert sweep("seed=1,2,5", lost=(1,)) == 1
    rows = sweep_rows(SWEEP)
    assert [row["exit_code"] for row in rows.values()] == ["0", "1", "0"] and rows["1"]["error"]


def test_a_refused_job_leaves_no_folder_at_any_depth(sweep: Callable[..., int]) -> None:
    assert sweep("seed=4,1", "hydra.sweep.subdir=a${seed}/b") == 2
    assert {path.name for path in SWEEP.iterdir()} == {"a1", "multirun.yaml", "sweep.csv"}


def test_a_sweep_locks_its_folder_while_it_runs(sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    watch(monkeypatch, sweep_record, "began", lambda *_: locked.append(lock.at_work(SWEEP)))
    assert sweep("seed=1,2") == 0 and locked == [True, True]
    assert not lock.at_work(SWEEP) and not (SWEEP / "running.json").exists()
    before = {path: path.stat().st_mtime_ns for path in SWEEP.rglob("*")}
    assert sweep("seed=1,2") == 2
    assert {path: path.stat().st_mtime_ns for path in SWEEP.rglob("*")} == before
