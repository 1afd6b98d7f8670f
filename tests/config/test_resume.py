"""`resume=...` as a user types it: a run that was killed or stopped goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cupynet.config import resume
from cupynet.core.errors import ConfigError
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.commands import QUICK, run
from tests.support.resumed_runs import FAULTY, same, started


# each setting with one end; tests/test_soak.py kills at every place of a save, with and without averages
@pytest.mark.parametrize(
    ("settings", "iteration", "end"),
    [
        (["workers=2"], 7, "SIGTERM"),  # between averages, and three iterations after the last checkpoint
        (["workers=4", "parallel=gradients"], 9, "SIGTERM"),
        pytest.param(["workers=1", "parallel=pipeline"], 21, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(["workers=1"], 18, "SIGTERM", marks=pytest.mark.slow),  # in the second epoch
        (["workers=2", "model=lenet_norm"], 7, "SIGKILL"),  # with running estimates and dropout
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, settings, iteration, end):
    started(tmp_path, "whole", *settings)
    code = -9 if end == "SIGKILL" else 143
    _, stderr = started(tmp_path, "parts", *settings, code=code, END_AFTER=str(iteration), END_BY=end)
    if end == "SIGTERM":
        assert f"to resume: cupynet train resume={tmp_path / 'parts'}" in stderr
    began = json.loads((tmp_path / "parts" / "started.json").read_text())["started"]
    state = Checkpoints(tmp_path / "parts" / "checkpoints").newest().state
    compile_s = state["workers"][0]["numbers"]["clock"]["compile_s"]
    stdout, stderr = run(tmp_path, "resume=parts", FAULTY[0])
    assert stderr == "" and "resuming after iteration" in stdout
    assert ("the previous run in this folder was killed (process " in stdout) == (end == "SIGKILL")
    assert same(tmp_path / "whole", tmp_path / "parts")
    cost = Run(tmp_path / "parts").summary().cost
    assert cost.wall_s >= cost.train_s + cost.evaluate_s + cost.compile_s and cost.compile_s > compile_s > 0
    assert json.loads((tmp_path / "parts" / "started.json").read_text())["started"] == began
    assert not [entry for entry in (tmp_path / "parts" / "checkpoints").iterdir() if "." in entry.name]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir() and entry.name[0] != "_") == [
        "parts",
        "whole",
    ]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    started(folder, "outputs/day/run", "workers=2", code=143, END_AFTER="7", END_BY="SIGTERM")
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["resume=outputs/day/run", "batch_size=16"],
            "batch_size=16: the run in outputs/day/run was made with 32: leave",
        ),
        (["resume=outputs/day/run", "parallel=gradients"], "the run in outputs/day/run was made with"),
        (["resume=outputs/day"], "resume='outputs/day': is neither the folder of a run nor one of its checkpoints"),
        (["resume=latest", "-m", "seed=1,2"], "resume=latest: "),
        (["resume=outputs/day/run", "parallel.launcher=mpi"], "parallel.launcher=mpi: the run in outputs/day/run was"),
    ],
)
def test_invalid_resumes_are_refused(stopped, arguments, said):
    before = {
        path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file() and ".hydra" not in path.parts
    }
    stdout, stderr = run(stopped, *arguments, FAULTY[0], code=2)
    assert said in stderr and stderr.count("\n") == 1 and "Traceback" not in stdout
    log = stopped / "outputs" / "day" / "run" / "train.log"
    assert {path: time for path, time in before.items() if path != log} == {
        path: path.stat().st_mtime_ns for path in before if path != log
    }


def test_a_running_run_cannot_be_resumed(stopped, tmp_path, monkeypatch):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/day/run")
    assert resume.find("latest", []) == folder
    hold = Hold(folder)
    try:
        before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}
        for arguments in (
            [f"resume={folder}"],
            [f"resume={folder}", "hydra.run.dir=other", "epochs=9"],
            [*QUICK, f"hydra.run.dir={folder}"],
            ["-m", *QUICK, "workers=1,2", f"hydra.sweep.dir={folder}"],
        ):
            stdout, stderr = run(tmp_path, *arguments, FAULTY[0], code=2)
            assert stderr.startswith(f"cupynet: {folder}: a run is in progress there (process {os.getpid()} on ")
            assert (stdout, stderr.count("\n")) == ("", 1)
        assert before == {
            path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")
        }
        assert resume.find("latest", []) is None and not Path("other").exists()
    finally:
        hold.release()
    assert resume.find("latest", []) == folder


def test_latest_is_the_newest_unfinished_run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    stdout, _ = run(tmp_path, "resume=latest", "epochs=4", FAULTY[0])
    assert "resuming after iteration" in stdout
    assert json.loads((tmp_path / "outputs/day/run/summary.json").read_text())["epochs"] == 4
    stdout, _ = run(tmp_path, "resume=outputs/day/run", FAULTY[0])
    assert "the run is complete (epoch 4)" in stdout
    before = (tmp_path / "outputs/day/run/weights.safetensors").read_bytes()
    stdout, _ = run(tmp_path, "resume=latest", "hydra.run.dir=outputs/day/run", FAULTY[0])
    assert "the run is complete (epoch 4)" in stdout
    (tmp_path / "outputs/day/run/summary.json").unlink()
    run(tmp_path, "resume=latest", FAULTY[0])  # as if killed before its results were written
    assert (tmp_path / "outputs/day/run/weights.safetensors").read_bytes() == before
    stdout, _ = run(tmp_path, "resume=latest", *QUICK, "hydra.run.dir=new")
    assert "there is no run to resume: a new run begins" in stdout and (tmp_path / "new/summary.json").is_file()


def test_a_run_resumes_with_other_workers_and_another_dtype(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    stdout, stderr = run(tmp_path, "resume=outputs/day/run", "workers=3", "dtype=double", "backend=numpy", FAULTY[0])
    assert stderr == "" and "3 workers continue from 2: all start from the mean of the weights" in stdout
    assert "not bit for bit: workers 3, then 2; backend numpy, then numba; dtype double, then float" in stdout
    summary = json.loads((tmp_path / "outputs/day/run/summary.json").read_text())
    assert (summary["workers"], summary["dtype"], summary["epochs"]) == (3, "double", 3)


def test_a_new_run_does_not_overwrite_another(stopped, tmp_path):
    """Neither an unfinished run is overwritten nor a finished one, nor what is stored of its settings."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    folder, store = tmp_path / "outputs/day/run", Checkpoints(tmp_path / "outputs/day/run/checkpoints")
    steps = store.steps()
    _, stderr = run(tmp_path, *QUICK, "hydra.run.dir=outputs/day/run", code=2)
    assert (
        "outputs/day/run: already holds a run" in stderr and "to resume: cupynet train resume=outputs/day/run" in stderr
    )
    assert store.steps() == steps
    run(tmp_path, "resume=outputs/day/run", FAULTY[0])
    kept = (folder / "summary.json").read_bytes()
    run(tmp_path, "resume=outputs/day/run", "epochs=9", FAULTY[0], code=-9, END_AFTER="40", END_BY="SIGKILL")
    assert (folder / "summary.json").read_bytes() == kept  # until there are better ones
    stdout, _ = run(tmp_path, "resume=latest", "epochs=5", FAULTY[0])
    assert "resuming after iteration" in stdout and json.loads((folder / "summary.json").read_text())["epochs"] == 5
    kept = contents(folder)
    _, stderr = run(tmp_path, "data=mnist", "data.folder=nowhere", "hydra.run.dir=outputs/day/run", code=2)
    assert "outputs/day/run: already holds a run" in stderr
    assert contents(folder) == kept


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_resume_changes_nothing(stopped, tmp_path):
    """Whatever was asked for: what the next `resume=` does must not depend on one that did nothing."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "outputs/day/run/.hydra"
    before = contents(folder)
    no_data = ["data.folder=nowhere", "data=mnist", "epochs=7"]
    run(tmp_path, "resume=outputs/day/run", FAULTY[0], "callbacks.checkpoint.every_iterations=5", "epochs=0", code=2)
    run(tmp_path, "resume=outputs/day/run", FAULTY[0], *no_data, code=2)
    assert contents(folder) == before
    run(tmp_path, "resume=outputs/day/run", FAULTY[0])
    before = contents(folder)
    stdout, _ = run(tmp_path, "resume=outputs/day/run", FAULTY[0], "epochs=2", "workers=1")
    assert "its replicas" not in stdout and "the run is complete" in stdout
    assert contents(folder) == before
    run(tmp_path, "resume=outputs/day/run", FAULTY[0], "epochs=4")
    assert "epochs: 4\n" in (folder / "config.yaml").read_text()


def test_a_run_that_ended_without_a_checkpoint_is_done(tmp_path):
    """As one with checkpoints is: who asks again and again, until all is done, is let go."""
    latest = [*QUICK, "workers=1", "callbacks.checkpoint=null", "hydra.run.dir=run", "resume=latest"]
    run(tmp_path, *latest)
    before = contents(tmp_path / "run")
    stdout, stderr = run(tmp_path, *latest)
    assert stdout.startswith("resume=latest: the run in run ") and stderr == ""
    assert contents(tmp_path / "run") == before


def test_a_resumed_run_keeps_an_automatic_number_of_stages(tmp_path):
    """Whatever the machine that goes on has for each replica."""
    started(tmp_path, "run", "workers=1", "parallel=pipeline", code=143, END_AFTER="7", END_BY="SIGTERM")
    stages = json.loads((tmp_path / "run/started.json").read_text())["stages"]
    for workers in (2, 3):  # of one stage each, where there are as many cores
        more = ["callbacks.checkpoint.every_iterations=3", f"epochs={workers + 1}"]
        stdout, _ = run(tmp_path, "resume=run", FAULTY[0], f"workers={workers}", *more)
        begun = json.loads((tmp_path / "run/started.json").read_text())
        assert (begun["workers"], begun["stages"]) == (workers, stages) and "continues bit for bit" not in stdout


def test_a_moved_checkpoint_is_found(stopped, tmp_path):
    """Killed between the two renames that put one in place of another of the same iteration."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    store = Checkpoints(tmp_path / "outputs/day/run/checkpoints")
    *others, newest = store.steps()
    for step in others:
        shutil.rmtree(store.path(step))
    store.path(newest).rename(store.folder / f"{store.path(newest).name}.old-123")
    assert store.steps() == [newest]
    stdout, _ = run(tmp_path, "resume=latest", FAULTY[0])
    assert f"resuming after iteration {newest}" in stdout


def test_a_link_in_place_of_the_checkpoints(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "outputs/day/run"
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    _, stderr = run(tmp_path, "resume=outputs/day/run", FAULTY[0], code=65)
    assert "checkpoints: is a link, and going on would write where it leads" in stderr


def test_a_new_run_after_a_dry_run_has_no_old_checkpoints(tmp_path):
    """A trial's results are none; what it left does not pass for the new run's."""
    run(tmp_path, *QUICK, "fast_dev_run=true", "hydra.run.dir=run", "workers=1")
    assert Checkpoints(tmp_path / "run/checkpoints").steps()
    run(tmp_path, *QUICK, "data.train=100", "hydra.run.dir=run", "workers=1")
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [4]
    assert not (tmp_path / "run/FAST_DEV_RUN.txt").exists()


FULL = """
import resource
from cupynet.training import Callback

class Full(Callback):
    def __init__(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def test_a_full_disk_keeps_earlier_checkpoints(tmp_path):
    """No file may be longer than a megabyte, and LeNet's weights are 1.7: of a checkpoint, and of the results."""

    def limited(*arguments: str) -> str:
        full = ["trusted_modules=[full]", "+callbacks.full._target_=full.Full"]
        _, stderr = run(tmp_path, "resume=run", "epochs=2", *arguments, *full, code=74)
        assert stderr.count("\n") == 1
        return stderr

    def files() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)

    (tmp_path / "full.py").write_text(FULL)
    run(tmp_path, *QUICK, "workers=1", "hydra.run.dir=run")
    (tmp_path / "run" / "summary.json").unlink()
    before = files()
    assert "step-00000038: the checkpoint cannot be written (File too large)" in limited()
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest().state["iteration"] == 19
    assert files() == before
    assert "weights.safetensors: cannot be written (File too large)" in limited("callbacks.checkpoint=null")
    assert files() == before
    run(tmp_path, "resume=run", "epochs=2", "~callbacks.full", "trusted_modules=[full]")


def test_only_train_resumes(stopped):
    _, stderr = run(stopped, "resume=outputs/day/run", command="bench", code=2)
    assert stderr.startswith("cupynet: resume=outputs/day/run: ")


def test_a_damaged_checkpoint_is_passed_over(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    store = Checkpoints(tmp_path / "outputs/day/run/checkpoints")
    first, newest = store.steps()[-2:]
    path = store.path(newest) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    stdout, _ = run(tmp_path, "resume=outputs/day/run", FAULTY[0])
    assert (
        f"{path.relative_to(tmp_path)}: damaged, expected SHA-256" in stdout
        and f"resuming after iteration {first}" in stdout
    )


def test_paths_of_runs_and_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("it's/a run/.hydra")
    path = Path("it's/a run")
    (path / ".hydra/config.yaml").touch()
    assert resume.asked(["resume=x"]) == "x" and resume.asked(["resume=null"]) is None and resume.asked(["a=2"]) is None
    step = path / "checkpoints/step-00000012"
    assert resume.run_of(step) == resume.run_of(step.parent) == resume.run_of(path) == path
    assert resume.checkpoint_of(step) == step and resume.checkpoint_of(path) == path / "checkpoints"
    assert resume.find(str(step), []) == step and resume.find("latest", []) is None
    for wrong in ("nowhere", "it's", "a\0b"):
        with pytest.raises(ConfigError, match="is neither"):
            resume.find(wrong, [])
