"""A sweep with jobs in other processes, as with Hydra's launchers for joblib and Slurm."""

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
from tests.support.compared_runs import made
from tests.support.run_folders import sweep_rows


def prepare(settings: Settings) -> Settings:
    return settings


def task(settings: Settings, folder: Path) -> None:
    config.deferred()()
    logging.getLogger("cupynet").warning("little was learned")
    (made(folder / "made", test_accuracy=settings.seed / 10) / "summary.json").rename(folder / "summary.json")


class Elsewhere(ProcessLauncher):
    """Runs each job as another process would: with a copy of the task and without this process's state."""

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
            folders: Any = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
            work: Any = {"task_function": pickle.loads(self._task), "hydra_context": self._context, "config": job}
            Context().run(run_job, **work, **folders)  # an empty context, without the running command
            sys.argv, sweep_record._ended[:], HydraConfig.instance().cfg = here
        return []


@pytest.mark.usefixtures("in_folder", "minimal_conf")
def test_jobs_run_by_another_hydra_launcher_are_in_sweep_csv_and_show_their_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.cupynet_processes.Processes", Elsewhere)
    sweep = Path("outputs/s")
    typed = ["train", "-m", "hydra/launcher=processes", f"hydra.sweep.dir={sweep}", "seed=1,2,5"]
    monkeypatch.setattr(sys, "argv", typed)
    config.run(task, prepare, "config", Settings)
    stdout, stderr = capsys.readouterr()
    found = [(row["seed"], row["test_accuracy"]) for row in sweep_rows(sweep).values()]
    assert found == [("1", "0.1"), ("2", "0.2"), ("5", "0.5")]
    assert stderr == "" and all(f"warning: job {number}: " in stdout for number in range(3))
    assert Path("outputs/latest").resolve() == sweep.resolve()
    assert {path.name for path in sweep.iterdir()} == {"0", "1", "2", "multirun.yaml", "sweep.csv"}
