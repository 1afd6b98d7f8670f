"""`resume=...` as a user types it: a run that was killed or stopped goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from cupynet import config
from cupynet.commands import train
from cupynet.config import resume
from cupynet.core import lock
from cupynet.core.errors import ConfigError, Interrupted, OutputError
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.commands import QUICK, SMALL, run
from tests.support.resumed_runs import MORE, EndAfter, resumed, same, started, trained
from tests.support.user_files import digits, write_pictures

RUN = Path("outputs/day/run")


NORM = ["workers=2", "model=lenet_norm", "epochs=2"]  # with running estimates and dropout


@pytest.fixture(scope="module")
def one_stopped(tmp_path_factory):
    """A folder with a run that SIGTERM stopped between averages, three iterations after its last checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted, match=f"to resume: cupynet train resume={folder / RUN}"):
        trained(folder / RUN, *QUICK, *SMALL, *MORE, *NORM, callbacks=[EndAfter(7)])
    return folder


@pytest.fixture
def stopped(one_stopped, in_folder, caplog, minimal_conf):
    """The folder of that run, below the working folder."""
    shutil.copytree(one_stopped, in_folder, dirs_exist_ok=True)
    caplog.set_level("INFO", "cupynet")
    return RUN


def train_job(settings, folder):
    """Run a job as the command does."""
    return train.train(train.prepare(settings), folder)


@contextlib.contextmanager
def resumes_bit_for_bit(run_folder: Path, settings: list[str]) -> Iterator[None]:
    """Check that the run that the `with` block resumes equals an uninterrupted one."""
    trained(Path("whole"), *QUICK, *SMALL, *MORE, *settings)
    began = json.loads((run_folder / "started.json").read_text())["started"]
    state = Checkpoints(run_folder / "checkpoints").newest().state
    compile_s = state["workers"][0]["numbers"]["clock"]["compile_s"]
    yield
    assert same(Path("whole"), run_folder)
    cost = Run(run_folder).summary().cost
    assert cost.wall_s >= cost.train_s + cost.evaluate_s + cost.compile_s and cost.compile_s > compile_s > 0
    assert json.loads((run_folder / "started.json").read_text())["started"] == began
    assert not [entry for entry in (run_folder / "checkpoints").iterdir() if "." in entry.name]


def test_a_stopped_run_resumes_bit_for_bit(stopped, caplog):
    with resumes_bit_for_bit(stopped, NORM):
        resumed(stopped)
    assert "resuming after iteration" in caplog.text


# tests/test_soak.py kills at every place of a save, with and without averages
@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize(
    ("settings", "iteration", "end"),
    [
        (["workers=2", "parallel=gradients", "epochs=2"], 11, "SIGKILL"),  # in the second epoch
        pytest.param(["workers=1", "parallel=pipeline"], 21, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(["workers=1"], 18, "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(in_folder, settings, iteration, end, command, capsys):
    code = -9 if end == "SIGKILL" else 143
    started(in_folder, "parts", *settings, code=code, END_AFTER=str(iteration), END_BY=end)
    before = set(in_folder.iterdir())
    with resumes_bit_for_bit(Path("parts"), settings):
        assert command("resume=parts", "~callbacks.fault", task=train_job)[0] == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == "" and "resuming after iteration" in stdout
    assert set(in_folder.iterdir()) == before | {in_folder / "whole"}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["resume=outputs/day/run", "batch_size=16"],
            "batch_size=16: the run in outputs/day/run was started with 32, and",
        ),
        (["resume=outputs/day"], "resume='outputs/day': is neither the folder of a run nor one of its checkpoints"),
        (["resume=latest", "-m", "seed=1,2"], "resume=latest: "),
    ],
)
def test_invalid_resumes_are_refused(stopped, arguments, said, command, capsys):
    before = modification_times(stopped)
    assert command(*arguments) == (2, [])
    stderr = capsys.readouterr().err
    assert said in stderr and stderr.count("\n") == 1
    assert modification_times(stopped) == before


def test_a_setting_that_only_one_of_two_runs_has_is_refused():
    for now, then in (({}, {"momentum": 0.9}), ({"momentum": 0.9}, {})):
        with pytest.raises(ConfigError, match=r"^optimizer\.momentum="):
            resume.refuse_other({"optimizer": now}, {"optimizer": then}, RUN)
    resume.refuse_other({"epochs": 2}, {"epochs": 1, "callbacks": {"mine": {"path": "x"}}}, RUN)


THEN = {"_target_": "A", "peak": 0.2}
SCHEDULE = {"rate": {"_target_": "cupynet.optim.Warmup", "steps": 9, "then": THEN}}
OTHER = {"rate": {**SCHEDULE["rate"], "then": {**THEN, "peak": 0.1}}}


@pytest.mark.parametrize(
    ("given", "stored", "named", "made"),
    [
        ({"rate": 0.01}, SCHEDULE, "rate=0.01: ", "{_target_:cupynet.optim.Warmup,steps:9,then:{_target_:A,peak:0.2}}"),
        (SCHEDULE, {"rate": 0.01}, "rate={_target_:cupynet.optim.Warmup,", "with 0.01,"),
        (OTHER, SCHEDULE, "rate.then.peak=0.1: ", "with 0.2,"),
        ({"rate": 0.01}, {}, "rate=0.01: ", "without it"),
    ],
)
def test_a_refused_setting_names_what_the_run_was_made_with(given, stored, named, made):
    with pytest.raises(ConfigError) as refused:
        resume.refuse_other({**given, "seed": 1}, {**stored, "seed": 1}, RUN)
    assert str(refused.value).startswith(named) and made in str(refused.value)


@pytest.mark.usefixtures("minimal_conf")
def test_a_run_on_grey_pictures_of_several_kinds_goes_on_as_its_message_says(in_folder, command):
    """An earlier version trained on them without a number of channels."""
    pictures = write_pictures(in_folder / "pictures", digits(20, 10))
    trained(
        Path("run"), "data=folder", f"data.folder={pictures}", "model=mlp", "backend=numpy", "workers=1", "epochs=1"
    )
    path = max(pictures.rglob("*.png"))
    with Image.open(path) as opened:
        opened.convert("P").save(path)
    again = ["resume=run", "epochs=2"]
    assert command(*again, task=train_job)[0] == 65
    assert command(*again, "data.channels=3", task=train_job)[0] == 2  # of another network
    assert command(*again, "data.channels=1", task=train_job)[0] == 0
    assert config.load("run").data["channels"] == 1
    assert command("resume=run", "epochs=3", "data.channels=null", task=train_job)[0] == 2


def test_a_running_run_cannot_be_resumed(stopped, command, capsys, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    assert resume.find("latest", []) == stopped
    hold = Hold(stopped)
    try:
        before = modification_times(stopped), contents(stopped)
        for arguments in (
            [f"resume={stopped}", "hydra.run.dir=other", "epochs=9"],
            [f"hydra.run.dir={stopped}"],
        ):
            capsys.readouterr()
            assert command(*arguments) == (2, [])
            stdout, stderr = capsys.readouterr()
            assert stderr.startswith(f"cupynet: {stopped}: a run is in progress there (process {os.getpid()} on ")
            assert (stdout, stderr.count("\n")) == ("", 1)
        assert (modification_times(stopped), contents(stopped)) == before
        assert resume.find("latest", []) is None and not Path("other").exists()
    finally:
        hold.release()
    assert resume.find("latest", []) == stopped


def test_latest_is_the_newest_unfinished_run(stopped, command, capsys):
    assert resume.find("latest", []) == stopped
    resumed(stopped)
    assert Run(stopped).summary().outcome.epochs == 2
    assert resume.find("latest", [f"hydra.run.dir={stopped}"]) == stopped
    assert resume.find("latest", []) is None
    before = (stopped / "weights.safetensors").read_bytes()
    (stopped / "summary.json").unlink()  # as if killed before its results were written
    assert resume.find("latest", []) == stopped
    resumed(stopped)
    assert (stopped / "weights.safetensors").read_bytes() == before and (stopped / "summary.json").is_file()
    capsys.readouterr()
    code, (settings,) = command("resume=latest")
    assert code == 0 and settings.resume is None
    assert "there is no run to resume: a new run begins" in capsys.readouterr().out


def test_a_run_resumes_with_other_workers_and_another_dtype(stopped, caplog):
    resumed(stopped, "workers=3", "dtype=double", "backend=numpy", "epochs=2")
    assert "3 workers continue from 2: all start from the mean of the weights" in caplog.text
    assert "not bit for bit: workers 3, then 2; backend numpy, then numba; dtype double, then float" in caplog.text
    summary = Run(stopped).summary()
    assert (summary.setup.workers, summary.setup.dtype, summary.outcome.epochs) == (3, "double", 2)


def test_a_new_run_does_not_overwrite_another(stopped, command, capsys):
    """Neither an unfinished run is overwritten nor a finished one, nor what is stored of its settings."""

    def refused(*arguments: str) -> str:
        before = contents(stopped)
        assert command(*arguments)[0] == 2
        assert contents(stopped) == before
        return str(capsys.readouterr().err)

    said = f"{stopped}: already holds a run"
    stderr = refused(f"hydra.run.dir={stopped}")
    assert said in stderr and f"cupynet train resume={stopped}" in stderr
    assert said in refused("-m", f"hydra.sweep.dir={stopped}")
    resumed(stopped, "epochs=1")
    with pytest.raises(ConfigError, match=said):
        resume.refuse_taken(stopped)
    kept = (stopped / "summary.json").read_bytes()
    with pytest.raises(KeyError, match="as if killed"):
        resumed(stopped, "epochs=2", callbacks=[EndAfter(16, killed=True)])
    assert (stopped / "summary.json").read_bytes() == kept  # until there are better ones
    assert resume.find("latest", []) == stopped
    resumed(stopped, "epochs=2")
    assert Run(stopped).summary().outcome.epochs == 2


def test_a_refused_resume_changes_nothing(stopped, command, capsys):
    """Whatever was asked for: what the next `resume=` does must not depend on one that did nothing."""
    folder = stopped / ".hydra"
    before = contents(folder)
    assert command("resume=latest", "backend.tf32=true", "epochs=7", check=train.prepare)[0] == 2
    assert contents(folder) == before
    assert command("resume=latest", "callbacks.checkpoint.keep_last=5", task=train_job)[0] == 0
    assert "keep_last: 5\n" in (folder / "config.yaml").read_text()
    capsys.readouterr()
    before = contents(stopped / ".hydra"), (stopped / "summary.json").read_bytes()
    assert command(f"resume={stopped}", "epochs=2", "workers=1", task=train_job)[0] == 0
    stdout = capsys.readouterr().out
    assert "its replicas" not in stdout and "the run is complete" in stdout
    assert command(f"resume={stopped}", "epochs=1", task=train_job)[0] == 2  # it has two
    assert (contents(stopped / ".hydra"), (stopped / "summary.json").read_bytes()) == before


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("callbacks.history.path=/proc/x/h.jsonl", 74),  # found before the data are loaded
        ("callbacks.checkpoint.path={other}", 2),  # found when training begins
    ],
)
def test_a_resume_that_fails_before_training_changes_no_settings(stopped, change, code, command):
    other = Path("other").absolute()
    Checkpoints(other).save(3, {}, {})
    kept = [stopped / ".hydra", stopped / "checkpoints"]
    before = [contents(folder) for folder in kept], (stopped / "started.json").read_bytes()
    code_now, _ = command(f"resume={stopped}", "epochs=9", change.format(other=other), task=train_job)
    assert code_now == code
    assert ([contents(folder) for folder in kept], (stopped / "started.json").read_bytes()) == before
    assert command(f"resume={stopped}", task=train_job)[0] == 0
    assert config.load(stopped).epochs == 2 == Run(stopped).summary().outcome.epochs


def test_a_run_resumed_from_an_earlier_checkpoint_is_unfinished_again(stopped, command, in_folder):
    """Its results are from before, and no checkpoint is newer than they are."""
    resumed(stopped)
    first, last = Checkpoints(stopped / "checkpoints").steps()[-2:]
    assert resume.find("latest", []) is None
    kept = (stopped / "summary.json").read_bytes()
    with pytest.raises(KeyError, match="as if killed"):
        path = stopped / "checkpoints" / f"step-{first:08d}"
        experiment = train.prepare(config.load(stopped, [f"resume={resume.quoted(path)}"]))
        experiment.callbacks.append(EndAfter(last, killed=True))
        train.train(experiment, stopped)
    assert (stopped / "summary.json").read_bytes() == kept and resume.find("latest", []) == stopped
    shutil.copytree(stopped, in_folder / "outputs" / "copied")  # whatever the times of its files are
    assert not resume.finished(in_folder / "outputs" / "copied")
    resumed(stopped)
    shutil.rmtree(in_folder / "outputs" / "copied")
    assert resume.find("latest", []) is None and resume.finished(stopped)


def test_a_run_that_ended_without_a_checkpoint_is_done(in_folder, command, capsys):
    """As one with checkpoints is: who asks again and again, until all is done, is let go."""
    trained(in_folder / "run", *QUICK, "model=mlp", "data.train=64", "workers=1", "callbacks.checkpoint=null")
    before = contents(in_folder / "run")
    capsys.readouterr()
    assert command("hydra.run.dir=run", "resume=latest") == (0, [])
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith("resume=latest: the run in run ") and stderr == ""
    assert contents(in_folder / "run") == before


def test_a_resumed_run_keeps_an_automatic_number_of_stages(in_folder, caplog):
    """Whatever the machine that goes on has for each replica."""
    caplog.set_level("INFO", "cupynet")
    folder = in_folder / "run"
    trained(folder, *QUICK, "model=mlp", "data.train=64", "workers=1", "parallel=pipeline")
    stages = json.loads((folder / "started.json").read_text())["stages"]
    resumed(folder, "workers=3", "epochs=2")  # of one stage each, where there are as many cores
    begun = json.loads((folder / "started.json").read_text())
    assert (begun["workers"], begun["stages"]) == (3, stages) and "continues bit for bit" not in caplog.text


def test_a_moved_checkpoint_is_found(stopped, caplog):
    """Killed between the two renames that put one in place of another of the same iteration."""
    store = Checkpoints(stopped / "checkpoints")
    *others, newest = store.steps()
    for step in others:
        shutil.rmtree(store.path(step))
    store.path(newest).rename(store.folder / f"{store.path(newest).name}.old-123")
    assert store.steps() == [newest] and resume.find("latest", []) == stopped
    resumed(stopped, "epochs=1")
    assert f"resuming after iteration {newest}" in caplog.text


def test_a_link_in_place_of_the_checkpoints(stopped, in_folder, command, capsys):
    (stopped / "checkpoints").rename(in_folder / "elsewhere")
    (stopped / "checkpoints").symlink_to(in_folder / "elsewhere")
    assert command(f"resume={stopped}") == (65, [])
    assert "checkpoints: must be a plain file" in capsys.readouterr().err


def test_a_new_run_after_a_dry_run_has_no_old_checkpoints(in_folder):
    """A trial's results are none; what it left does not pass for the new run's."""
    quick = [*QUICK, "model=mlp", "data.train=100", "workers=1"]
    trained(in_folder / "run", *quick, "fast_dev_run=true")
    assert Checkpoints(in_folder / "run/checkpoints").steps() == [1]
    resume.refuse_taken(in_folder / "run")
    trained(in_folder / "run", *quick)
    assert Checkpoints(in_folder / "run/checkpoints").steps() == [4]
    assert not (in_folder / "run/FAST_DEV_RUN.txt").exists()


@contextlib.contextmanager
def longest_file(most: int) -> Iterator[None]:
    """Let no file become longer than `most` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_earlier_checkpoints(in_folder):
    """No file may be longer than 100,000 bytes, and the network's weights have 203,000: of a checkpoint, and alone."""

    def files() -> list[Path]:
        return sorted({*in_folder.rglob("*")} - {Run(folder).failed_path})

    folder = in_folder / "run"
    trained(folder, *QUICK, "model=mlp", "model.layers.dense1.units=64", "data.train=128", "workers=1")
    (folder / "summary.json").unlink()
    before = files()
    for change, said in (
        ("epochs=2", "step-00000008: the checkpoint cannot be written (File too large)"),
        ("callbacks.checkpoint=null", "weights.safetensors: cannot be written (File too large)"),
    ):
        with longest_file(100_000), pytest.raises(OutputError, match=re.escape(said)) as caught:
            resumed(folder, "epochs=2", change)
        assert "\n" not in str(caught.value) and files() == before
    assert Checkpoints(folder / "checkpoints").newest().state["iteration"] == 4
    resumed(folder, "epochs=2")


# training further -----------------------------------------------------------------------------------------------------

STEP = ["optimizer.learning_rate._target_=cupynet.optim.Step", "+optimizer.learning_rate.initial=0.1"]
STEP += ["+optimizer.learning_rate.factor=0.5", "+optimizer.learning_rate.every=7"]


@pytest.mark.parametrize(
    ("rate", "workers", "same_in_one_go"),
    [
        ([], 1, False),  # OneCycle
        (["optimizer.learning_rate=0.05"], 1, True),
        (STEP, 2, True),
        (["parallel.learning_rate_scale=linear", *STEP], 2, True),
        (["parallel.learning_rate_scale=linear"], 2, False),
    ],
    ids=["one cycle", "constant", "step", "scaled step", "scaled cycle"],
)
def test_training_further_is_as_in_one_go_or_says_what_the_schedule_does(
    rate, workers, same_in_one_go, in_folder, caplog
):
    caplog.set_level("WARNING", "cupynet.commands")
    quick = [*QUICK, "model=mlp", "data.train=128", "backend=numpy", f"workers={workers}", *rate]
    quick = [each for each in quick if each != "epochs=1"]
    trained(in_folder / "whole", *quick, "epochs=4")
    trained(in_folder / "parts", *quick, "epochs=2")
    caplog.clear()
    resumed(in_folder / "parts", "epochs=4")
    one, other = (Run(in_folder / name).weights() for name in ("whole", "parts"))
    assert all((one[name] == other[name]).all() for name in one) == same_in_one_go
    assert [record.args[:3] for record in caplog.records if "schedule" in record.msg] == [(4, 2, 4)] * (
        not same_in_one_go
    )
    caplog.clear()
    resumed(in_folder / "parts", "epochs=4")
    assert not caplog.records


def test_a_run_resumed_as_planned_warns_of_nothing(stopped, caplog):
    caplog.set_level("WARNING")
    resumed(stopped)
    assert not [record for record in caplog.records if "schedule" in record.msg]


def test_only_train_resumes(in_folder):
    _, stderr = run(in_folder, "resume=outputs/day/run", command="bench", code=2)
    assert stderr.startswith("cupynet: resume=outputs/day/run: ")


def test_a_damaged_checkpoint_is_passed_over(stopped, caplog):
    store = Checkpoints(stopped / "checkpoints")
    first, newest = store.steps()[-2:]
    path = store.path(newest) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    resumed(stopped, "epochs=1")
    assert f"{path}: damaged, expected" in caplog.text
    assert f"resuming after iteration {first}" in caplog.text


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
