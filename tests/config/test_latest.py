"""outputs/latest: a link to the newest run, which `resume` and `evaluate` follow, and which never does harm."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import resume
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError, DataError
from tests.support.commands import Command

LATEST = Path("outputs/latest")
DONE = '{"stop_reason": null, "iterations": 4}'
DIVERGED = '{"stop_reason": "diverged", "iterations": 4}'
STOPPED = '{"stop_reason": "signal", "iterations": 4}'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str, *, checkpoint: bool = True, age_s: float = 0.0, summary: str | None = None) -> Path:
    """A run that was killed, or has this summary; its newest checkpoint was written so long ago."""
    run = Path(name)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("{}\n")
    if checkpoint:
        step = run / "checkpoints" / "step-00000004"
        step.mkdir(parents=True)
        os.utime(step, (time.time() - age_s,) * 2)
    if summary is not None:
        (run / "summary.json").write_text(summary)
    return run


# the link -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_latest_is_a_relative_link_to_the_newest_run() -> None:
    for name in ("outputs/day/one", "outputs/day/two"):
        resume.mark_latest(made(name))
        assert os.readlink(LATEST) == name.removeprefix("outputs/")
    resume.mark_latest(Path("outputs/day/one").resolve())
    assert os.readlink(LATEST) == "day/one" and sorted(os.listdir("outputs")) == ["day", "latest"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["elsewhere/run", "outputs", "."])
def test_no_link_outside_the_default_output_folder(name: str) -> None:
    Path("outputs").mkdir()
    Path(name).mkdir(exist_ok=True, parents=True)
    resume.mark_latest(Path(name))
    assert os.listdir("outputs") == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_users_file_named_latest_is_kept(kind: str) -> None:
    run = made("outputs/day/one")
    LATEST.mkdir() if kind == "folder" else LATEST.write_text("mine")
    resume.mark_latest(run)
    assert not LATEST.is_symlink() and sorted(os.listdir("outputs")) == ["day", "latest"]


@pytest.mark.usefixtures("here")
def test_file_systems_without_links_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "x")

    run = made("outputs/day/one")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    resume.mark_latest(run)
    assert os.listdir("outputs") == ["day"]


@pytest.mark.usefixtures("here")
def test_a_link_to_what_is_gone_is_replaced() -> None:
    run = made("outputs/day/one")
    LATEST.symlink_to("day/gone")
    resume.mark_latest(run)
    assert os.readlink(LATEST) == "day/one"


@pytest.mark.usefixtures("here")
def test_latest_leads_to_the_whole_sweep_or_search() -> None:
    """Its jobs may be processes, each of which begins a run."""
    job, trial = made("outputs/sweeps/day/time/0"), made("outputs/tune/day/time/trials/0000")
    (job.parent / "multirun.yaml").write_text("{}")
    (trial.parents[1] / "study.db").write_text("")
    resume.mark_latest(job)
    assert os.readlink(LATEST) == "sweeps/day/time"
    resume.mark_latest(trial)
    assert os.readlink(LATEST) == "tune/day/time"


@pytest.mark.usefixtures("here")
def test_a_sweep_in_outputs_itself_does_not_hide_its_jobs() -> None:
    job = made("outputs/0")
    Path("outputs/multirun.yaml").write_text("")
    resume.mark_latest(job)
    assert os.readlink(LATEST) == "0"


@pytest.mark.usefixtures("minimal_conf")
def test_the_link_is_made_when_training_begins(command: Command) -> None:
    def begins(settings: Settings, folder: Path) -> None:
        before = os.readlink(LATEST) if LATEST.is_symlink() else None
        config.training_begins()
        seen.append((before, os.readlink(LATEST), folder))

    def fails(settings: Settings, folder: Path) -> None:
        raise DataError("a picture is broken")

    seen: list[tuple[str | None, str, Path]] = []
    assert command("-m", "workers=1", task=begins)[0] == 0
    assert command("workers=0")[0] == 2 and command(task=fails)[0] == 65
    assert command(task=begins)[0] == 0
    (nothing, link, job), (before, now, run) = seen
    assert nothing is None and (Path("outputs") / link).resolve() == job.resolve().parent
    assert before == link and (Path("outputs") / now).resolve() == run.resolve()


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("subdir", ["seed/${seed}", "a/b/${hydra.job.num}"])
def test_a_job_may_be_several_folders_below_its_sweep(subdir: str, command: Command) -> None:
    def task(settings: Settings, folder: Path) -> None:
        config.training_begins()
        resume.mark_latest(folder)  # as a job in a separate process does

    assert command("-m", "seed=1,2", f"hydra.sweep.subdir={subdir}", task=task)[0] == 0
    assert (LATEST / "multirun.yaml").is_file()


# the run that resume=latest finds -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("below", ["", "/checkpoints", "/checkpoints/step-00000004"])
def test_a_resumed_run_is_not_named_by_its_link(below: str) -> None:
    resume.mark_latest(made("outputs/day/one"))
    assert resume.find(f"outputs/latest{below}", []) == Path(f"outputs/day/one{below}")


@pytest.mark.usefixtures("here")
def test_resume_latest_is_the_newest_run_that_has_not_ended() -> None:
    old, job = made("outputs/day/old", age_s=50), made("outputs/sweeps/day/time/0", age_s=40)
    resume.mark_latest(job.parent)  # whose jobs are now two folders below outputs/, too
    assert resume.find("latest", []) == job
    (job / "summary.json").write_text(DONE)
    assert resume.find("latest", []) == old
    resume.mark_latest(made("outputs/day/new", checkpoint=False))
    assert resume.find("latest", []) == old


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["outputs/mine", "outputs/a/b/c", "outputs/sweeps/day/time/3"])
def test_the_latest_run_is_found_anywhere_below_outputs(name: str) -> None:
    run = made(name)
    assert resume.find("latest", []) == run


@pytest.mark.usefixtures("here")
def test_checkpoints_may_disappear_during_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is at work, by whoever begins another."""
    run = made("outputs/day/one")
    monkeypatch.setattr(resume, "checkpoints", lambda folder: {8: folder / "step-00000008"})
    assert resume.find("latest", []) == run
    monkeypatch.setattr(resume, "checkpoints", lambda folder: {})
    assert resume.find("latest", []) is None


def test_resume_latest_skips_trials_diverged_jobs_and_links(here: Path) -> None:
    """A search resumes its own trials, and a diverged job of a sweep has its result."""
    trial, job = made("outputs/tune/day/time/trials/0000"), made("outputs/sweeps/day/time/0", summary=DIVERGED)
    (trial.parents[1] / "study.db").write_text("")
    (job.parent / "multirun.yaml").write_text("")
    made("elsewhere/run")
    Path("outputs/link").symlink_to(here / "elsewhere")
    assert resume.find("latest", []) is None
    (job / "summary.json").write_text(STOPPED)
    assert resume.find("latest", []) == job


@pytest.mark.parametrize(
    ("job", "sweep"),
    [("elsewhere/sw/0", "elsewhere/sw"), ("elsewhere/sw/seed/1/0", "elsewhere/sw"), ("0", "."), ("../by/0", "../by")],
)
def test_a_diverged_job_of_a_sweep_anywhere_is_finished(
    job: str, sweep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = made(job, summary=DIVERGED)
    assert not resume.finished(run)
    Path(sweep, "multirun.yaml").write_text("")
    assert resume.finished(run)


@pytest.mark.usefixtures("here")
def test_a_file_of_another_sweep_far_above_does_not_finish_a_run() -> None:
    run = made("outputs/day/time", summary=DIVERGED)
    for folder in (".", "outputs"):
        Path(folder, "multirun.yaml").write_text("")
    assert resume.find("latest", []) == run and not resume.finished(run)


@pytest.mark.usefixtures("here")
def test_a_pipe_in_place_of_a_summary_is_not_waited_for() -> None:
    run = made("outputs/day/one")
    os.mkfifo(run / "summary.json")
    assert resume._unfinished() == run


# the folder of a new run ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("summary", [None, DONE, STOPPED])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_folder_with_another_run_is_refused(checkpoint: bool, summary: str | None) -> None:
    run = made("run", checkpoint=checkpoint, summary=summary)
    if checkpoint or summary is not None:
        with pytest.raises(ConfigError):
            resume.refuse_taken(run)
    (run / "FAST_DEV_RUN.txt").write_text("no results")
    resume.refuse_taken(run)


@pytest.mark.usefixtures("here")
def test_a_folder_with_a_sweep_is_refused() -> None:
    resume.refuse_taken(Path("nothing"))
    Path("multirun.yaml").write_text("")
    with pytest.raises(ConfigError):
        resume.refuse_taken(Path())


@pytest.mark.usefixtures("here")
def test_a_run_has_ended_if_its_summary_says_so() -> None:
    assert resume.finished(made("one", checkpoint=False, summary="{}"))
    assert not resume.finished(made("two", checkpoint=False, summary='{"stop_reason": "signal"}'))
    assert not resume.finished(Path("three"))
