"""outputs/latest: a link to the newest run, which `resume` and `evaluate` follow, and which never does harm."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import resume
from cupynet.core.errors import ConfigError, DataError

LATEST = Path("outputs/latest")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str, *, checkpoint: bool = True) -> Path:
    """A run that did not come to its end."""
    run = Path(name)
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("{}\n")
    if checkpoint:
        (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    return run


def test_latest_is_a_relative_link_to_the_newest_run(here):
    for name in ("outputs/day/one", "outputs/day/two"):
        run = made(name)
        resume.mark_latest(run)
        assert os.readlink(LATEST) == name.removeprefix("outputs/") and LATEST.resolve() == run.resolve()
    resume.mark_latest((here / "outputs/day/one").resolve())
    assert os.readlink(LATEST) == "day/one" and sorted(os.listdir("outputs")) == ["day", "latest"]


@pytest.mark.parametrize("name", ["elsewhere/run", "outputs", "."])
def test_no_link_outside_the_default_output_folder(name, here):
    Path("outputs").mkdir()
    Path(name).mkdir(exist_ok=True, parents=True)
    resume.mark_latest(Path(name))
    assert os.listdir("outputs") == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_users_file_named_latest_is_kept(kind, here):
    run = made("outputs/day/one")
    LATEST.mkdir() if kind == "folder" else LATEST.write_text("mine")
    resume.mark_latest(run)
    assert not LATEST.is_symlink() and sorted(os.listdir("outputs")) == ["day", "latest"]


def test_file_systems_without_links_are_silently_accepted(here, monkeypatch, capfd):
    def refuse(*_, **__):
        raise OSError(1, "x")

    run = made("outputs/day/one")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    resume.mark_latest(run)
    assert os.listdir("outputs") == ["day"] and capfd.readouterr() == ("", "")


def test_a_link_to_what_is_gone_is_replaced(here):
    made("outputs/day/one")
    LATEST.symlink_to("day/gone")
    resume.mark_latest(Path("outputs/day/one"))
    assert os.readlink(LATEST) == "day/one"


@pytest.mark.parametrize("below", ["", "/checkpoints", "/checkpoints/step-00000004"])
def test_a_resumed_run_is_not_the_latest(below, here):
    made("outputs/day/one")
    resume.mark_latest(Path("outputs/day/one"))
    found = resume.find(f"outputs/latest{below}", [])
    assert found == Path(f"outputs/day/one{below}")
    assert not {"latest"} & set(found.parts)


def test_resume_latest_skips_finished_runs(here):
    old = aged(made("outputs/day/old"), 50)
    job = aged(made("outputs/sweeps/day/time/0"), 40)
    resume.mark_latest(job.parent)  # whose jobs are now two folders below outputs/, too
    assert resume.find("latest", []) == job
    (job / "summary.json").write_text('{"stop_reason": null, "iterations": 4}')
    assert resume.find("latest", []) == old
    resume.mark_latest(made("outputs/day/new", checkpoint=False))
    assert resume.find("latest", []) == old


@pytest.mark.parametrize("name", ["outputs/mine", "outputs/mine/first", "outputs/a/b/c", "outputs/sweeps/day/time/3"])
def test_the_latest_run_is_found_anywhere_below_outputs(name, here):
    run = made(name)
    assert resume.find("latest", []) == run


def test_checkpoints_may_disappear_during_the_search(here, monkeypatch):
    """Of a run that is at work, by whoever begins another."""
    run = made("outputs/day/one")
    monkeypatch.setattr(resume, "checkpoints", lambda folder: {8: folder / "step-00000008"})
    assert resume.find("latest", []) == run
    monkeypatch.setattr(resume, "checkpoints", lambda folder: {})
    assert resume.find("latest", []) is None
    (run / "summary.json").write_text('{"stop_reason": null, "iterations": 4}')
    assert not resume._goes_on(run)


def test_resume_latest_skips_trials_diverged_jobs_and_links(here):
    """A search resumes its own trials, and a diverged job of a sweep has its result."""
    trial, job = made("outputs/tune/day/time/trials/0000"), made("outputs/sweeps/day/time/0")
    (trial.parents[1] / "study.db").write_text("")
    (job.parent / "multirun.yaml").write_text("")
    (job / "summary.json").write_text('{"stop_reason": "diverged", "iterations": 4}')
    (here / "elsewhere").mkdir()
    made("elsewhere/run")
    Path("outputs/link").symlink_to(here / "elsewhere")
    assert resume.find("latest", []) is None
    (job / "summary.json").write_text('{"stop_reason": "signal", "iterations": 4}')
    assert resume.find("latest", []) == job


@pytest.mark.parametrize("summary", [None, '{"stop_reason": null, "iterations": 4}'])
def test_a_folder_with_another_run_is_refused(summary, here):
    run = made("outputs/day/one")
    if summary is not None:
        (run / "summary.json").write_text(summary)
    with pytest.raises(ConfigError, match="^outputs/day/one: already holds a run .*resume=outputs/day/one"):
        resume.refuse_taken(run)
    (run / "summary.json").write_text('{"stop_reason": null, "iterations": 4}')
    (run / "FAST_DEV_RUN.txt").write_text("no results")
    resume.refuse_taken(run)
    (run / "summary.json").unlink()
    resume.refuse_taken(run)  # nor is one that was stopped
    kept = made("outputs/day/two", checkpoint=False)
    (kept / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="two: already holds a run"):
        resume.refuse_taken(kept)
    assert resume.finished(kept) and not resume.finished(Path("outputs/day/three"))
    (kept / "summary.json").write_text('{"stop_reason": "signal"}')  # and there is nothing to go on from
    assert not resume.finished(kept)
    with pytest.raises(ConfigError, match="two: already holds a run"):
        resume.refuse_taken(kept)
    resume.refuse_taken(Path("outputs/day/nothing"))
    (run.parent / "multirun.yaml").write_text("")
    with pytest.raises(ConfigError, match="^outputs/day: already holds a run or a sweep: name another folder"):
        resume.refuse_taken(run.parent)


def aged(run: Path, seconds: float) -> Path:
    """Its newest checkpoint was written so long ago."""
    at = time.time() - seconds
    os.utime(run / "checkpoints" / "step-00000004", (at, at))
    return run


@pytest.mark.usefixtures("minimal_conf")
def test_the_link_is_made_when_training_begins(command, here):
    seen = []

    def task(settings, folder):
        before = LATEST.is_symlink() and os.readlink(LATEST)
        config.training_begins()
        seen.append((before, os.readlink(LATEST), folder))

    assert command("-m", "workers=1", task=task)[0] == 0
    ((before, link, job),) = seen
    assert not before and (Path("outputs") / link).resolve() == job.resolve().parent
    assert command("workers=0")[0] == 2 and os.readlink(LATEST) == link

    def fails(settings, folder):
        raise DataError("a picture is broken")

    assert command(task=fails)[0] == 65 and os.readlink(LATEST) == link
    assert command(task=task)[0] == 0
    (_, (before, now, run)) = seen
    assert before == link and (Path("outputs") / now).resolve() == run.resolve()


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("subdir", ["seed/${seed}", "a/b/${hydra.job.num}"])
def test_a_job_may_be_several_folders_below_its_sweep(subdir, command, here):
    def task(settings, folder):
        config.training_begins()
        resume.mark_latest(folder)  # as a job in a separate process does

    assert command("-m", "seed=1,2", f"hydra.sweep.subdir={subdir}", task=task)[0] == 0
    assert (LATEST / "multirun.yaml").is_file()


def test_latest_leads_to_the_whole_sweep_or_search(here):
    """Its jobs may be processes, each of which begins a run."""
    job, trial = made("outputs/sweeps/day/time/0"), made("outputs/tune/day/time/trials/0000")
    (job.parent / "multirun.yaml").write_text("{}")
    (trial.parents[1] / "study.db").write_text("")
    resume.mark_latest(job)
    assert os.readlink(LATEST) == "sweeps/day/time"
    resume.mark_latest(trial)
    assert os.readlink(LATEST) == "tune/day/time"


def test_a_sweep_in_outputs_itself_does_not_hide_its_jobs(here):
    job = made("outputs/0")
    Path("outputs/multirun.yaml").write_text("")
    resume.mark_latest(job)
    assert os.readlink(LATEST) == "0"


def test_a_diverged_job_several_folders_below_its_sweep_is_finished(here):
    job = made("outputs/sweeps/day/time/seed/1")
    Path("outputs/sweeps/day/time/multirun.yaml").write_text("")
    (job / "summary.json").write_text('{"stop_reason": "diverged", "iterations": 4}')
    assert resume.find("latest", []) is None


@pytest.mark.parametrize(
    ("job", "sweep"),
    [
        ("elsewhere/sw/0", "elsewhere/sw"),
        ("elsewhere/sw/seed/1/0", "elsewhere/sw"),
        ("0", "."),
        ("outputs/0", "outputs"),
        ("../beside/0", "../beside"),
    ],
)
def test_a_diverged_job_of_a_sweep_anywhere_is_finished(job, sweep, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = made(job)
    (run / "summary.json").write_text('{"stop_reason": "diverged", "iterations": 4}')
    assert not resume.finished(run)
    Path(sweep, "multirun.yaml").write_text("")
    assert resume.finished(run)


def test_a_file_of_another_sweep_far_above_does_not_finish_a_run(here):
    run = made("outputs/day/time")
    (run / "summary.json").write_text('{"stop_reason": "diverged", "iterations": 4}')
    for folder in (".", "outputs"):
        Path(folder, "multirun.yaml").write_text("")
    assert resume.find("latest", []) == run and not resume.finished(run)


def test_a_pipe_in_place_of_a_summary_is_not_waited_for(here):
    run = made("outputs/day/one")
    os.mkfifo(run / "summary.json")
    assert resume._unfinished() == run
