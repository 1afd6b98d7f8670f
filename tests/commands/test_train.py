"""The commands as a user types them: in a process of their own, in an empty directory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cupynet.backend.cuda import gpus
from cupynet.commands import evaluate, train
from cupynet.commands.train_job import saved
from cupynet.core.errors import ConfigError
from cupynet.core.files import load_weights, save_weights
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.commands import QUICK, ROOT, SMALL, environment, run, run_folder
from tests.support.mpi import NO_MPI
from tests.support.resumed_runs import started, trained
from tests.support.settings import settings_of
from tests.support.user_files import digits, write_npz

TINY = [*QUICK, *SMALL]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with two workers, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    stdout, stderr = run(folder, *QUICK, "workers=2", "epochs=2", "report_every_iterations=5")
    return run_folder(folder), stdout, stderr


def test_a_run_writes_the_files_that_other_commands_read(finished):
    folder, stdout, stderr = finished
    names = {p.name for p in folder.iterdir()}
    results = {"history.jsonl", "summary.json", "weights.safetensors", "examples.safetensors"}
    assert names == {".hydra", "train.log", "started.json", "checkpoints", *results}
    assert stderr == ""
    for text in (
        "test accuracy",
        "images/s",
        f"run folder     outputs/{folder.parent.name}/{folder.name}\n",
        "backend numba, dtype float, 2 workers on cpu",
    ):
        assert text in stdout
    summary = json.loads((folder / "summary.json").read_text())
    expected = {"dataset": "synthetic", "fallback": False, "backend": "numba", "devices": ["cpu", "cpu"]}
    expected |= {"dtype": "float", "workers": 2, "seed": 123, "epochs": 2, "images": 1200, "stopped_by": None}
    assert {key: summary[key] for key in expected} == expected
    for key in ("images_per_s", "wall_s", "train_s", "test_loss"):
        assert summary[key] > 0
    assert 0 <= summary["test_accuracy"] <= 1
    assert summary["environment"]["blas"][0]["num_threads"] >= 1


def test_history_has_a_row_per_report_and_per_epoch(finished):
    rows = [json.loads(line) for line in (finished[0] / "history.jsonl").read_text().splitlines()]
    reports = [row for row in rows if row["kind"] == "report"]
    assert [row["iteration"] for row in reports] == [5, 10, 15, 20]
    keys = {
        "epoch",
        "loss",
        "score_after_averaging",
        "images_per_s",
        "compute_s",
        "data_s",
        "averaging_s",
        "divergence",
    }
    assert all(keys <= row.keys() for row in reports)
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert [row["epoch"] for row in epochs] == [1, 2]
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert epochs[-1]["test_accuracy"] == summary["test_accuracy"]


def test_a_summary_has_the_times_of_each_worker(finished):
    folder, stdout, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    assert all(len(row[name]) == 2 for row in epochs for name in ("compute_s", "data_s", "averaging_s", "waiting_s"))
    sent = [row["bytes_sent"] for row in rows]
    assert (
        sent[0] > 0
        and sent == sorted(sent)
        and sent[-1] <= summary["bytes_sent"] == sum(summary["spent"]["bytes_sent"])
    )
    vectors = (
        2 * 431_080 * 4
    )  # weights and momentum, all-reduced by two workers after iterations 3, 6 ... 18 and two ends
    assert summary["bytes_sent"] == pytest.approx(8 * 2 * vectors, rel=0.3)
    assert sum(summary["spent"]["samples"]) == 1200 and summary["divergence"] > 0
    assert summary["advice"] and f"advice {summary['advice']}" in " ".join(stdout.split())
    assert "spent          averaging " in stdout and "% apart" in stdout


def test_a_run_that_has_not_learned_says_so(finished, tmp_path):
    """Steps far too large, which clipping keeps finite: nothing else would tell."""
    stdout, stderr = run(tmp_path, *QUICK, "workers=1", "optimizer.learning_rate=10")
    (warning,) = [line for line in stdout.splitlines() if "warning: " in line]
    assert (
        "it has hardly learned: accuracy 1" in warning
        and warning.endswith(": lower learning_rate, or train longer")
        and stderr == ""
    )
    assert "it has hardly learned" in (run_folder(tmp_path) / "train.log").read_text()
    assert "it has hardly learned" not in finished[1]


def test_early_stopping_ends_a_run_and_keeps_its_best(tmp_path, monkeypatch, capsys):
    """The validation images choose, the test images are looked at once, and of the best weights."""
    settings = ["callbacks=early_stopping", "data.validation=100", "workers=2", "epochs=9", "data.train=700"]
    worst = ["callbacks.early_stopping.patience=2", "callbacks.early_stopping.direction=max"]  # the first is the best
    stdout, _ = run(tmp_path, *TINY, *settings, *worst)
    folder = run_folder(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["early_stopping"]
    assert found["reason"] == "patience" and found["restored"] and summary["stop_reason"] == "early"
    assert summary["stopped_by"].startswith("patience: no better loss in 2 evaluations")
    scores = {int(epoch): score for epoch, score in found["scores"].items()}
    best = max(scores, key=scores.__getitem__)
    assert found["best_epoch"] == best < summary["epochs"] == len(scores)
    epochs = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    accuracy = {row["epoch"]: row["validation_accuracy"] for row in epochs if row["kind"] == "epoch"}
    assert summary["validation_accuracy"] == accuracy[best]
    assert f"best epoch     {best}, validation loss {scores[best]:.4g}" in stdout
    assert "early stopping: patience" in stdout
    assert "the same as in summary.json" in evaluated(monkeypatch, capsys, folder)[1]


DIVERGE = """
from cupynet.training import Callback

class Diverge(Callback):
    every_rank = True

    def on_iteration_end(self, trainer):
        if (trainer.rank, trainer.iteration) == (trainer.world.size - 1, 25):
            trainer.params.master[0] = float("nan")
"""


def test_a_run_that_diverges_keeps_its_best(tmp_path, monkeypatch, capsys):
    (tmp_path / "diverge.py").write_text(DIVERGE)
    fault = ["trusted_modules=[diverge]", "+callbacks.diverge._target_=diverge.Diverge"]
    settings = ["callbacks=early_stopping", "data.validation=200", "workers=2", "epochs=4", "data.train=840"]
    stdout, stderr = run(tmp_path, *TINY, *settings, *fault, code=3)
    folder = run_folder(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["early_stopping"]
    assert (found["reason"], found["best_epoch"], found["restored"]) == ("diverged", 2, True)
    assert summary["stop_reason"] == "diverged" and summary["epochs"] == 2 and summary["test_accuracy"] is None
    assert stderr == f"cupynet: {summary['stopped_by']}\n" and "not finite" in stderr
    assert f"the best weights (epoch 2) are in {folder}" in stdout
    assert all(np.isfinite(each).all() for each in load_file(folder / "weights.safetensors").values())
    assert evaluated(monkeypatch, capsys, folder)[0] == 0


def test_early_stopping_needs_images_that_are_held_out():
    with pytest.raises(ConfigError, match=r"^callbacks\.early_stopping: "):
        train.prepare(settings_of(*QUICK, "callbacks=early_stopping"))


def test_weights_have_the_layers_names_in_single_precision(finished):
    weights = load_file(finished[0] / "weights.safetensors")
    layers = ("conv1", "conv2", "dense1", "output")
    assert set(weights) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert {w.dtype.name for w in weights.values()} == {"float32"}
    assert weights["conv2.weight"].shape == (5, 5, 20, 50)


def evaluated(monkeypatch, capsys, *arguments):
    """The exit code of evaluate in this process, what it printed, and the one line of its error."""
    monkeypatch.setattr("sys.argv", ["evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        evaluate.main()
    told = capsys.readouterr()
    assert told.err.count("\n") == bool(left.value.code) and told.err[:9] in ("", "cupynet: ")
    return left.value.code, told.out, told.err


def test_evaluate_repeats_the_figures_exactly(finished, monkeypatch, capsys):
    summary = json.loads((finished[0] / "summary.json").read_text())
    code, out, _ = evaluated(monkeypatch, capsys, finished[0])
    assert code == 0 and f"test accuracy {summary['test_accuracy']:.4f}, loss {summary['test_loss']!r}" in out
    assert "the same as in summary.json" in out and "Confusion" in out
    code, out, _ = evaluated(monkeypatch, capsys, finished[0], "workers=1", "backend=numpy")
    assert code == 0 and f"test accuracy {summary['test_accuracy']:.4f}" in out


def test_evaluate_does_not_compare_with_a_run_that_was_not_tested(finished, tmp_path, monkeypatch, capsys):
    """Such as a trial of a search."""
    run = shutil.copytree(finished[0], tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "test_accuracy": None, "test_loss": None, "test": None}))
    code, out, _ = evaluated(monkeypatch, capsys, run)
    assert code == 0 and "test accuracy" in out and "None" not in out


def test_evaluate_prints_json_and_takes_checkpoints(finished, monkeypatch, capsys):
    folder = finished[0]
    (folder.parent / "latest").symlink_to(folder)
    summary = json.loads((folder / "summary.json").read_text())
    code, out, _ = evaluated(monkeypatch, capsys, folder.parent / "latest", "--json")
    found = json.loads(out)
    assert (code, found["accuracy"], found["loss"]) == (0, summary["test_accuracy"], summary["test_loss"])
    assert found["dataset"] == "synthetic" and found["confusion"] == summary["test"]["confusion"]
    code, out, _ = evaluated(monkeypatch, capsys, folder / "checkpoints", "backend=numpy")
    assert code == 0 and f"test accuracy {summary['test_accuracy']:.4f}" in out and "summary.json" not in out
    first = min((folder / "checkpoints").glob("step-*"))
    code, out, _ = evaluated(monkeypatch, capsys, "--json", first)
    assert code == 0 and json.loads(out)["loss"] > summary["test_loss"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"test_accuracy": None, "test_loss": None}, "has no accuracy on test images"),
        ({"test_accuracy": 0.5}, "says 0.5"),
    ],
)
def test_evaluate_says_what_it_is_compared_with(changed, said, finished, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | changed))
    code, out, _ = evaluated(monkeypatch, capsys, copy)
    assert code == 0 and out.splitlines()[-1] == f"summary.json {said}"


@pytest.mark.parametrize(("checkpoint", "said"), [("callbacks.checkpoint=null", True), ("epochs=1", False)])
def test_evaluate_says_that_an_earlier_version_chose_other_images(checkpoint, said, tmp_path, monkeypatch, capsys):
    """Its checkpoints do not identify its images, and a limit kept the first of them."""
    data = ["data=npz", f"data.file={write_npz(tmp_path / 'digits.npz', digits(100, 90))}", "data.limit=20"]
    trained(tmp_path / "run", *data, "model=mlp", "backend=numpy", "workers=1", "epochs=1", checkpoint)
    assert evaluated(monkeypatch, capsys, tmp_path / "run")[1].endswith("the same as in summary.json\n")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"test_accuracy": 1.0}))
    assert ("limit=20" in evaluated(monkeypatch, capsys, tmp_path / "run")[1]) == said
    assert "limit=20" not in evaluated(monkeypatch, capsys, tmp_path / "run", "data.limit=20")[1]


def test_a_summary_is_not_a_setting(finished, tmp_path, monkeypatch, capsys):
    """Its number of workers is among the settings of an evaluation: it must not be a reference."""
    monkeypatch.setenv("SECRET", "1234567")
    copy = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"workers": "${oc.env:SECRET}"}))
    code, out, err = evaluated(monkeypatch, capsys, copy)
    assert (code, out) == (65, "") and "summary.json: workers=" in err and "1234567" not in err


def test_evaluate_refuses_weights_that_are_not_finite(finished, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    weights = load_weights(copy / "weights.safetensors")
    weights["conv1.weight"][0] = np.inf
    save_weights(copy / "weights.safetensors", weights)
    code, out, err = evaluated(monkeypatch, capsys, copy)
    assert (code, out) == (65, "") and "weights conv1.weight are not finite" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: run"),
        (["absent"], "absent: there is no such folder. The folders of runs are in outputs/"),
        ([__file__], f"{__file__}: there is no such folder. The folders of runs are in outputs/"),
        ([Path(__file__).parent], f"{Path(__file__).parent}: is not a finished run"),
        (["RUN", "workrs=1"], "did you mean 'workers'?"),
        (["RUN", "--jsn"], "unrecognized arguments: --jsn"),
        (["RUN", "json"], "json"),
        (
            ["RUN", "model.layers.dense1.units=7"],
            "weight 'dense1.weight' has shape (800, 500), this network needs (800, 7)",
        ),
    ],
    ids=["no folder", "missing folder", "file", "not a run", "setting", "option", "no key", "other network"],
)
def test_evaluate_refuses_wrong_arguments(arguments, expected, finished, monkeypatch, capsys):
    given = [finished[0] if each == "RUN" else each for each in arguments]
    code, out, err = evaluated(monkeypatch, capsys, *given)
    assert (code, out) in ((2, ""), (65, "")) and expected in err


def test_evaluate_refuses_damaged_weights(finished, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    content = bytearray((copy / "weights.safetensors").read_bytes())
    content[-100] ^= 1
    (copy / "weights.safetensors").write_bytes(content)
    code, _, err = evaluated(monkeypatch, capsys, copy)
    assert code == 65 and "weights.safetensors: damaged weights, expected SHA-256" in err


BAD = {
    "model.layers.conv2.kernel=50": "Conv2D 'conv2' kernel=(50, 50), dilation=(1, 1) is larger than its input",
    "backend=cupy": "backend=cupy: CuPy",
}
WRONG = {
    "parallel.averaging_frequency=0": "at least 1",
    "batch_size=-1": "at least 1",
    "optimizer.momentum=2": "below 1",
    "model.layers.output.activation=softmax": "SoftmaxNLL applies softmax itself",
    "devices=[0]": "leave devices out",
    "data.validation=-1": "validation",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_refused_before_a_folder_exists(override, tmp_path):
    if override == "backend=cupy" and gpus.probe() is None:
        pytest.skip("this machine has a GPU")
    stdout, stderr = run(tmp_path, "data=synthetic", override, code=2)
    assert stderr.count("\n") == 1 and stderr.startswith("cupynet: ") and BAD[override] in stderr
    assert override.split("=")[0].split(".")[0] in stderr
    assert stdout == "" and not list(tmp_path.iterdir())


def test_wrong_values_are_refused_before_training():
    for override, message in WRONG.items():
        with pytest.raises(ConfigError) as refused:
            train.prepare(settings_of("data=synthetic", "backend=numpy", override))
        assert message in str(refused.value) and override.split("=")[0].split(".")[0] in str(refused.value)


def test_a_bad_job_of_a_sweep_does_not_stop_the_others(tmp_path):
    _, stderr = run(tmp_path, "-m", *TINY, "workers=1", "model.layers.conv2.kernel=50,5", code=2)
    assert stderr.count("\n") == 1 and "job 0: " in stderr and "kernel=(50, 50)" in stderr
    (sweep,) = tmp_path.glob("outputs/sweeps/*/*")
    assert not (sweep / "0").exists() and (sweep / "1" / "summary.json").is_file()


@pytest.mark.parametrize("experiment", [p.stem for p in sorted((ROOT / "conf/experiment").glob("*.yaml"))])
def test_every_experiment_trains(experiment, tmp_path):
    settings = [f"experiment={experiment}", "data=synthetic", "data.limit=50", "epochs=1", "batch_size=8"]
    if "launcher: mpi" not in (ROOT / "conf/experiment" / f"{experiment}.yaml").read_text():
        trained(tmp_path, *settings)
    elif NO_MPI:
        pytest.skip(NO_MPI)
    else:
        run(tmp_path, *settings, f"hydra.run.dir={tmp_path}")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["images"] == 50 and summary["test_accuracy"] is not None


@pytest.mark.parametrize(("backend", "dtype"), [("numba", "half"), ("numpy", "double")])
def test_every_backend_and_dtype_trains(backend, dtype, tmp_path):
    trained(tmp_path, *QUICK, f"backend={backend}", f"dtype={dtype}", *SMALL, "epochs=6", "workers=2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["backend"], summary["dtype"]) == (backend, dtype) and summary["test_accuracy"] > 0.3


def test_missing_mnist_falls_back_and_says_so(tmp_path):
    nowhere = ["data=mnist", "data.folder=nowhere", "data.fallback=synthetic"]
    stdout, _ = run(tmp_path, *nowhere, "data.limit=200", "epochs=1", *SMALL)
    assert "SYNTHETIC DIGITS" in stdout
    assert json.loads((run_folder(tmp_path) / "summary.json").read_text())["fallback"] is True


def test_missing_data_in_a_chosen_folder_end_the_run(tmp_path):
    _, stderr = run(tmp_path, "epochs=1", code=65, CUPYNET_DATA="typo")
    assert stderr.startswith("cupynet: MNIST IS NOT THERE: ") and "typo/mnist lacks " in stderr
    assert stderr.count("\n") == 1 and {path.name for path in run_folder(tmp_path).iterdir()} == {".hydra", "train.log"}


FAILING = """
from cupynet.nn import Layer

class Failing(Layer):
    '''Fails in its nth training step; each worker has one of its own.'''

    def __init__(self, step: int, worker: int):
        self.step, self.worker, self.done = step, worker, 0

    def build(self, input, params, backend):
        return input

    def forward(self, x, context):
        if context.train and context.samples.any():
            self.done += 1
            import threading
            if self.done == self.step and threading.current_thread().name.endswith(str(self.worker)):
                self.fail()
        return x, lambda dy: dy

    def fail(self):
        raise ZeroDivisionError("on purpose")

class Interrupting(Failing):
    def fail(self):
        raise KeyboardInterrupt

class Hanging(Failing):
    def fail(self):
        import time
        time.sleep(600)
"""


# tests/parallel/launchers/test_threads.py has the failures of each worker
@pytest.mark.parametrize(("step", "worker"), [pytest.param(1, 0, marks=pytest.mark.slow), (4, 2)])
def test_a_failing_worker_ends_the_process_with_its_own_traceback(step, worker, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    part = f"+model.layers={{bad:{{_target_:failing.Failing,step:{step},worker:{worker}}}}}"
    began = time.monotonic()
    _, stderr = run(tmp_path, *TINY, "workers=3", "trusted_modules=[failing]", part, code=1)
    assert time.monotonic() - began < 60
    assert "ZeroDivisionError: on purpose" in stderr and "failing.py" in stderr
    if sys.version_info >= (3, 11):
        assert f"worker {worker} (numba, device 0), epoch 1, at batch" in stderr


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_keyboard_interrupt_in_user_code_is_not_reported_as_a_signal(workers, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    thread = "Thread" if workers == 1 else 1  # the end of its name
    part = f"+model.layers={{bad:{{_target_:failing.Interrupting,step:2,worker:{thread}}}}}"
    settings = [*QUICK, *SMALL, f"workers={workers}", "trusted_modules=[failing]", part]
    _, stderr = run(tmp_path, *settings, code=130)
    assert "in fail\n" in stderr and stderr.endswith("cupynet: KeyboardInterrupt (in module failing)\n")


@pytest.mark.slow
def test_a_hanging_worker_ends_the_process(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    part = "+model.layers={bad:{_target_:failing.Hanging,step:3,worker:1}}"
    settings = [*TINY, "workers=2", "parallel.timeout_s=2", "trusted_modules=[failing]", part]
    _, stderr = run(tmp_path, *settings, code=1)
    assert "worker 0 waited 2 s for the other workers" in stderr and stderr.count("\n") == 1


# tests/core/test_signals.py has the codes of all signals, and a run that SIGINT ends
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGUSR1, 143)]
)
def test_a_signal_ends_a_run_with_its_results_saved(number, code, tmp_path):
    ending = {"END_AFTER": "12", "END_BY": number.name}
    started(tmp_path, "run", "workers=2", "parallel.averaging_frequency=end", code=code, **ending)
    check_results(tmp_path / "run", number)
    assert Checkpoints(tmp_path / "run/checkpoints").steps()


KILLING = """
import os, signal, time
from cupynet.nn import Layer

class Killing(Layer):
    def build(self, input, params, backend):
        return input

    def forward(self, x, context):
        if context.train and not context.samples.any():  # the pass before training
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the main thread has handled the signal
        return x, lambda dy: dy
"""


def test_a_signal_while_kernels_are_compiled_ends_the_run_at_once(tmp_path):
    (tmp_path / "killing.py").write_text(KILLING)
    part = "+model.layers={bad:{_target_:killing.Killing}}"
    _, stderr = run(tmp_path, *QUICK, "trusted_modules=[killing]", part, "workers=1", "hydra.run.dir=run", code=143)
    assert stderr == "cupynet: stopped by SIGTERM: nothing of this run was saved\n"
    assert not (tmp_path / "run" / "summary.json").exists()


def check_results(folder, number):
    """A run that a signal ended has weights, a summary, and a row for each epoch that it completed."""
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == number.name
    assert (folder / "weights.safetensors").exists()
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    epochs = [row["epoch"] for row in rows if row["kind"] == "epoch"]
    assert epochs == list(range(1, len(epochs) + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_from_outside_ends_a_run_with_its_results_saved(number, code, tmp_path):
    arguments = [*QUICK, "data.train=3000", "epochs=10000", "workers=2", "evaluate_every_epochs=10000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cupynet", "train", *arguments, "report_every_iterations=1"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size for p in tmp_path.glob("outputs/*/*/history.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    check_results(run_folder(tmp_path), number)


SIGNALLING = """
import os, signal, time
from cupynet.data import Synthetic
from cupynet.nn import Layer

class Slow(Synthetic):
    '''Is told to stop while it loads.'''

    def load(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

class Late(Layer):
    '''The first evaluation comes after the last average.'''
    sent = False

    def build(self, input, params, backend):
        return input

    def forward(self, x, context):
        if not context.train and not Late.sent:
            Late.sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return x, lambda dy: dy
"""


@pytest.fixture
def signalling(tmp_path):
    (tmp_path / "signalling.py").write_text(SIGNALLING)


def test_a_signal_during_loading_ends_a_run_at_once(signalling, tmp_path):
    began = time.monotonic()
    part = "data._target_=signalling.Slow"
    _, stderr = run(tmp_path, *TINY, "trusted_modules=[signalling]", part, code=143)
    assert stderr == "cupynet: stopped by SIGUSR1: nothing of this run was saved\n" and time.monotonic() - began < 50


def test_a_signal_during_the_last_evaluation_keeps_the_results_and_ends_a_sweep(signalling, tmp_path):
    part = "+model.layers={late:{_target_:signalling.Late}}"
    arguments = ["-m", *TINY, "trusted_modules=[signalling]", part, "workers=1,2"]
    stdout, _ = run(tmp_path, *arguments, code=143)
    (summary,) = tmp_path.glob("outputs/sweeps/*/*/*/summary.json")
    assert json.loads(summary.read_text())["test_accuracy"] is not None
    assert "job 0 ended with exit code 143: stopped by SIG" in stdout and "job 1" not in stdout


def test_evaluate_refuses_other_images_than_the_runs(finished, tmp_path, monkeypatch, capsys):
    copy = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    summary = json.loads((copy / "summary.json").read_text()) | {"dataset": "mnist"}
    (copy / "summary.json").write_text(json.dumps(summary))
    code, _, err = evaluated(monkeypatch, capsys, copy)
    assert code == 65
    assert err == "cupynet: the run used mnist, but only synthetic was found: restore mnist, or set data=...\n"
    assert evaluated(monkeypatch, capsys, copy, "data.test=200")[0] == 0


@pytest.mark.slow
def test_fifty_failing_workers_never_hang(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    rng = random.Random(3)
    for _ in range(50):
        step, worker = rng.randint(1, 6), rng.randint(0, 2)
        part = f"+model.layers={{bad:{{_target_:failing.Failing,step:{step},worker:{worker}}}}}"
        settings = [*TINY, "workers=3", "trusted_modules=[failing]", part]
        began = time.monotonic()
        _, stderr = run(tmp_path, *settings, code=1)
        assert "ZeroDivisionError: on purpose" in stderr and time.monotonic() - began < 10 + 20  # start-up included


@pytest.mark.slow
@pytest.mark.skipif("CUPYNET_DATA" not in os.environ, reason="needs MNIST below CUPYNET_DATA")
def test_mnist_reaches_99_percent(tmp_path):
    data = str(Path(os.environ["CUPYNET_DATA"]).resolve())
    accuracies = []
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run(folder, f"seed={seed}", "workers=2", "evaluate_every_epochs=10", "data.fallback=null", CUPYNET_DATA=data)
        accuracies.append(json.loads((run_folder(folder) / "summary.json").read_text())["test_accuracy"])
    assert sum(accuracies) / 3 >= 0.99 and min(accuracies) >= 0.989


def test_a_run_with_other_classes_is_evaluated_again(tmp_path, monkeypatch, capsys):
    """The classes were chosen on the command line, and one is the user's own, which evaluation does not need."""
    (tmp_path / "mine.py").write_text("from cupynet import Callback\n\n\nclass Quiet(Callback):\n    pass\n")
    own = ["trusted_modules=[mine]", "+callbacks.own._target_=mine.Quiet", "optimizer._target_=cupynet.optim.SGD"]
    run(tmp_path, *TINY, "workers=2", *own)
    assert "the same as in summary.json" in evaluated(monkeypatch, capsys, run_folder(tmp_path))[1]


def test_a_run_that_a_callback_stopped_says_so_and_is_evaluated(tmp_path, monkeypatch, capsys):
    code = "from cupynet import Callback\n\n\nclass Stop(Callback):\n    def on_iteration_end(self, trainer):\n"
    code += "        if trainer.iteration == 4:\n            trainer.stop('it is enough [bold]')\n"
    (tmp_path / "mine.py").write_text(code)
    own = ["trusted_modules=[mine]", "+callbacks.own._target_=mine.Stop", "data.validation=100"]
    stdout, _ = run(tmp_path, *TINY, "workers=2", "parallel.averaging_frequency=2", *own)
    assert "stopped        it is enough [bold]" in stdout and "test accuracy" in stdout
    summary = json.loads((run_folder(tmp_path) / "summary.json").read_text())
    assert (summary["stopped_by"], summary["iterations"], summary["epochs"]) == ("it is enough [bold]", 4, 0)
    assert summary["validation_accuracy"] is not None
    assert "the same as in summary.json" in evaluated(monkeypatch, capsys, run_folder(tmp_path))[1]


def test_the_command_that_resumes_a_run_names_what_is_not_stored(tmp_path):
    run = Run(tmp_path)
    settings = settings_of("callbacks=mlflow")
    assert "resume" not in saved(run, settings)
    (run.checkpoints_path / "step-00000001").mkdir(parents=True)
    assert saved(run, settings).endswith(f"cupynet train resume={tmp_path} callbacks.mlflow.uri=null")


def test_equal_runs_leave_equal_files(tmp_path):
    """Byte for byte, the times in the history aside."""
    timed = ("images_per_s", "compute_s", "data_s", "averaging_s", "waiting_s", "train_s")
    found = []
    settings = [*TINY, "workers=2", "epochs=2", "report_every_iterations=4"]
    one, two = (tmp_path / name for name in ("one", "two"))
    run(tmp_path, *settings, "hydra.run.dir=one", PYTHONHASHSEED="1")
    trained(two, *settings)
    for folder in (one, two):
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        history = "\n".join(json.dumps({k: v for k, v in row.items() if k not in timed}) for row in rows)
        found.append(((folder / "weights.safetensors").read_bytes(), history))
    assert found[0] == found[1]
    assert found[0][1].count('"kind": "epoch"') == 2 and found[0][1].count('"kind": "report"') == 5
