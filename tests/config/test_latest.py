"""outputs/latest, a link to the newest run; the run that `resume=latest` finds; folders that contain a run."""

import os
import time
from pathlib import Path

import pytest

from cupynet import config
from cupynet.commands.tune.command import for_hydra
from cupynet.config import command_line, resume
from cupynet.config.load_model import LoadedRun
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from cupynet.reporting.folder import read_run
from cupynet.runs.layout import RESULTS
from tests.support.commands import Command
from tests.support.refusals import refused

LATEST = Path("outputs/latest")
DONE = '{"stop_reason": null, "iterations": 4}'
DIVERGED = '{"stop_reason": "diverged", "iterations": 4}'
STOPPED = '{"stop_reason": "signal", "iterations": 4}'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def made(name: str, *, checkpoint: bool = True, age_s: float = 0.0, summary: str | None = None) -> Path:
    """Make a run that was killed or has this summary. Its newest checkpoint is `age_s` old."""
    run = Path(name)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("trusted_modules: []\n")
    if checkpoint:
        step = run / "checkpoints" / "step-00000004"
        step.mkdir(parents=True)
        os.utime(step, (time.time() - age_s,) * 2)
    if summary is not None:
        (run / "summary.json").write_text(summary)
    return run


def test_outputs_latest_is_a_relative_link_to_the_newest_run() -> None:
    for name in ("outputs/day/one", "outputs/day/two"):
        resume.mark_latest(made(name))
        assert os.readlink(LATEST) == name.removeprefix("outputs/")
    resume.mark_latest(Path("outputs/day/one").resolve())
    assert os.readlink(LATEST) == "day/one" and sorted(os.listdir("outputs")) == ["day", "latest"]


def test_outputs_latest_points_only_to_folders_in_outputs_and_replaces_no_file_of_the_user() -> None:
    Path("outputs").mkdir()
    for name in ("elsewhere/run", "outputs", "."):
        Path(name).mkdir(exist_ok=True, parents=True)
        resume.mark_latest(Path(name))
        assert os.listdir("outputs") == []
    LATEST.write_text("mine")
    resume.mark_latest(made("outputs/day/one"))
    assert LATEST.read_text() == "mine"


@pytest.mark.parametrize(
    ("run", "file", "target"),
    [
        ("outputs/sweeps/day/time/0", "outputs/sweeps/day/time/multirun.yaml", "sweeps/day/time"),
        ("outputs/tune/day/time/trials/0000", "outputs/tune/day/time/study.db", "tune/day/time"),
        ("outputs/sweeps/day/time/seed/1", "outputs/sweeps/day/time/multirun.yaml", "sweeps/day/time"),
        ("outputs/0", "outputs/multirun.yaml", "0"),
    ],
    ids=["sweep", "search", "deep job", "sweep in outputs itself"],
)
def test_outputs_latest_leads_to_the_whole_sweep_or_search(run: str, file: str, target: str) -> None:
    job = made(run)
    Path(file).write_text("")
    resume.mark_latest(job)
    assert os.readlink(LATEST) == target


@pytest.mark.usefixtures("minimal_conf")
def test_outputs_latest_is_made_when_training_begins(command: Command) -> None:
    def task(settings: Settings, folder: Path) -> None:
        assert not LATEST.is_symlink()
        config.deferred()()
        assert LATEST.resolve() == folder.resolve()

    assert command(task=task)[0] == 0


@pytest.mark.parametrize("below", ["", "/checkpoints/step-00000004"])
def test_weights_from_outputs_latest_are_the_same_for_all_jobs_of_a_sweep_and_trials_of_a_search(below: str) -> None:
    resume.mark_latest(made("outputs/day/one"))
    given = [f"weights=choice(outputs/latest{below},null)", "model=mlp"]
    expected = [f"weights=choice(outputs/day/one{below},null)", "model=mlp"]
    assert [*command_line.read([*given, "-m"], Settings, 0).arguments] == [*expected, "-m"]
    assert command_line.read(given, Settings, 0).arguments == given  # a single run reads the weights first
    arguments, _ = for_hydra([f"weights=outputs/latest{below}", "seed=range(1,3)"])
    assert f"weights=outputs/day/one{below}" in arguments
    resume.mark_latest(made("outputs/day/a=1,b=2"))  # a name that Hydra would read as a sweep
    assert [*command_line.read([*given, "-m"], Settings, 0).arguments] == [*given, "-m"]


def test_resuming_outputs_latest_resumes_the_folder_that_it_links_to() -> None:
    resume.mark_latest(made("outputs/day/one"))
    for below in ("", "/checkpoints", "/checkpoints/step-00000004"):
        assert resume.find(f"outputs/latest{below}", []) == Path(f"outputs/day/one{below}")


@pytest.mark.parametrize(("file", "run"), [("multirun.yaml", "0"), ("study.db", "trials/0000")])
def test_a_sweep_or_search_is_refused_as_a_run_and_one_of_its_runs_is_suggested(file: str, run: str) -> None:
    folder = Path("outputs/day/several")
    made(str(folder / run), checkpoint=False)
    (folder / file).touch()
    for use in (lambda: resume.find(str(folder), []), lambda: LoadedRun(folder), lambda: read_run(folder)):
        with pytest.raises(ConfigError) as caught:
            use()
        assert str(folder / run) in str(caught.value)


def test_resume_latest_finds_the_newest_unfinished_run() -> None:
    old, job = made("outputs/day/old", age_s=50), made("outputs/sweeps/day/time/0", age_s=40)
    resume.mark_latest(job.parent)  # now the job is also two folders below outputs/, through the link
    assert resume.find("latest", []) == job
    (job / "summary.json").write_text(DONE)
    resume.mark_latest(made("outputs/day/new", checkpoint=False))
    assert resume.find("latest", []) == old


def test_resume_latest_with_hydra_run_dir_finds_the_run_in_that_folder() -> None:
    named, _ = made("named", age_s=50), made("outputs/day/newer")
    assert resume.find("latest", ["hydra.run.dir=named"]) == named
    assert resume.find("latest", ["hydra.run.dir=new"]) is None


def test_resume_latest_skips_trials_of_searches_diverged_jobs_and_linked_folders(here: Path) -> None:
    """A search resumes its own trials, and a diverged job is finished."""
    trial, job = made("outputs/tune/day/time/trials/0000"), made("outputs/sweeps/day/time/0", summary=DIVERGED)
    (trial.parents[1] / "study.db").write_text("")
    (job.parent / "multirun.yaml").write_text("")
    made("elsewhere/run")
    Path("outputs/link").symlink_to(here / "elsewhere")
    assert resume.find("latest", []) is None
    (job / "summary.json").write_text(STOPPED)
    assert resume.find("latest", []) == job


def test_a_new_run_is_refused_in_the_folder_of_another_run_or_sweep() -> None:
    resume.check_untaken(Path("nothing"))
    resume.check_untaken(made("failed early", checkpoint=False))
    for run in (made("killed"), made("done", checkpoint=False, summary=DONE)):
        with pytest.raises(ConfigError):
            resume.check_untaken(run)
    Path("multirun.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        resume.check_untaken(Path())
    assert "resume=" not in str(caught.value)  # only a run can be resumed


def test_a_new_run_does_not_replace_results_of_the_same_names_from_another_program() -> None:
    run = made("run", checkpoint=False)  # a run that failed early
    (run / "weights.safetensors").touch()
    resume.check_untaken(run, RESULTS)
    Path("weights.safetensors").touch()
    resume.check_untaken(Path())  # for a command that does not write the file
    with pytest.raises(ConfigError):
        resume.check_untaken(Path(), RESULTS)
    (run / ".hydra" / "config.yaml").write_text("of: another program\n")
    with refused(""):
        resume.check_untaken(run)
