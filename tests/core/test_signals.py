"""Signals: the first ends a run soon and saves, the next ends it at once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cupynet.core import signals
from cupynet.core.errors import Interrupted
from tests.support.commands import QUICK, SMALL, environment, run
from tests.support.mpi import mpiexec, needs_mpi, ranks_of
from tests.support.resumed_runs import same

TINY = [*QUICK, *SMALL]

ALL = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)]


@pytest.mark.parametrize(("number", "code"), ALL)
def test_each_signal_has_its_exit_code(number: int, code: int) -> None:
    assert Interrupted(number).exit_code == code
    with pytest.raises(KeyboardInterrupt) as caught, signals.handled(signals.leave):
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert Interrupted.by(caught.value).exit_code == code
    assert Interrupted.by(KeyboardInterrupt()).exit_code == 130


def test_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        heard: list[int] = []
        with signals.handled(heard.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_installed_only_in_the_main_thread() -> None:
    def task() -> None:
        with signals.handled(found.append):
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[Any] = []
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


SECOND = """
import os, signal, time
import cupynet.runs.checkpoints as checkpoints
from cupynet.training import Callback

class Second(Callback):
    '''Two signals: one in training, one in the middle of the save that the first asked for.'''

    def on_iteration_end(self, trainer):
        if trainer.iteration == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            while trainer.consensus.request is None:  # if both signals are pending, Python handles SIGINT first
                time.sleep(0.001)
            def killed(folder):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            checkpoints._write_manifest = killed
"""


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    """In the middle of a save too, which leaves no part of a checkpoint behind."""
    (tmp_path / "second.py").write_text(SECOND)
    fault = ["trusted_modules=[second]", "+callbacks.fault._target_=second.Second"]
    _, stderr = run(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", *fault, code=130)
    first, last = stderr.splitlines()
    assert "SIGTERM" in first and "SIGINT" in last
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("number", "code", "moment"), [(signal.SIGINT, 130, 0.06), (signal.SIGTERM, 143, 0.25), (signal.SIGHUP, 143, 0.25)]
)
def test_in_the_first_moments_a_signal_ends_a_command_in_one_line(
    tmp_path: Path, number: signal.Signals, code: int, moment: float
) -> None:
    """`main` is reached by then: what takes long to import comes after it."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, *TINY, "epochs=1000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(moment)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert stderr.count("\n") == 1 and number.name in stderr, stderr


START = """
import sys
import cupynet.commands.train
sys.argv[0] = cupynet.commands.train.__file__
original = cupynet.commands.train._command
def begun():
    print("begun", flush=True)
    original()
cupynet.commands.train._command = begun
cupynet.commands.train.main()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_signal_after_the_command_keeps_its_exit_code(code: int) -> None:
    late = (
        "import atexit, os, signal, sys, time; from cupynet.core import signals\n"
        "atexit.register(lambda: [os.kill(os.getpid(), signal.SIGUSR1), time.sleep(5)])\n"
        f"signals.command(lambda: [print('done'), sys.exit({code})])\n"
    )
    done = subprocess.run([sys.executable, "-c", late], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


def test_a_command_ignores_sighup_under_nohup() -> None:
    """What it imports for its own work does not matter."""
    code = "import os, signal; from cupynet.core import signals; "
    code += "signals.command(lambda: os.kill(os.getpid(), signal.SIGHUP) or print('done'))"
    for before, expected in (["nohup"], (0, "done\n")), ([], (143, "")):
        done = subprocess.run([*before, sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == expected, done.stderr


HANGING_UP = """
import os, signal
from cupynet.training import Callback

class HangingUp(Callback):
    def on_iteration_end(self, trainer):
        if trainer.iteration == 3:
            os.kill(os.getpid(), signal.SIGHUP)
"""


def test_a_signal_in_the_last_round_leaves_a_complete_run_evaluated(tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(HANGING_UP.replace("trainer.iteration == 3", "trainer.iteration == 19"))
    arguments = [*TINY, "workers=1", "trusted_modules=[last]", "+callbacks.fault._target_=last.HangingUp"]
    stdout, stderr = run(tmp_path, *arguments, "hydra.run.dir=run", code=143)
    assert "SIGHUP" in stderr.splitlines()[-1]
    assert "test accuracy" in stdout and '"stop_reason": null' in (tmp_path / "run" / "summary.json").read_text()


FIFTY = [*TINY, "data.train=1200", "epochs=40", "report_every_iterations=10", "data.validation=40"]
FREQUENCIES = ["parallel.averaging_frequency=5", "parallel.averaging_frequency=end", "parallel=gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["threads", pytest.param("mpi", marks=needs_mpi)])
def test_fifty_signal_sequences_at_random_moments(
    tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGSTOP and SIGCONT may surround or follow a signal. Under mpiexec, all go to mpiexec or to one of the ranks.

    Each sequence is followed by a checkpoint within five seconds, from which the run resumes to the same end, bit for
    bit. Only SIGHUP to mpiexec ends it and all ranks at once.
    """
    rng, durable, killed = random.Random(7), list[float](), list[float]()
    for i in range(50):
        number, code = rng.choice(ALL)
        sequence = rng.choice(
            [(number,), (signal.SIGSTOP, number, signal.SIGCONT), (number, signal.SIGSTOP, signal.SIGCONT)]
        )
        workers, mark = (1, 2, 4)[i % 3], f"{tmp_path}/{i}"
        start = [sys.executable, "-m", "cupynet", "train"]
        if launcher == "mpi":
            start = [str(mpiexec()), "-n", str(workers), *start]
        settings = [*FIFTY, FREQUENCIES[i % 3], f"workers={workers}", f"parallel.launcher={launcher.rstrip('s')}"]
        whole, parts = tmp_path / f"whole{i % 3}", tmp_path / f"parts{i}"
        if not whole.exists():
            subprocess.run(
                [*start, *settings, f"hydra.run.dir={whole.name}"],
                cwd=tmp_path,
                env=environment(),
                check=True,
                capture_output=True,
            )
        process = subprocess.Popen(
            [*start, *settings, f"hydra.run.dir={parts.name}"], cwd=tmp_path, env=environment(MARK=mark),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        history = parts / "history.jsonl"
        while not (history.exists() and history.stat().st_size) and process.poll() is None:
            time.sleep(0.02)  # a run that is ended before it trains has nothing to save
        lasts_s = json.loads((whole / "summary.json").read_text())["train_s"]
        time.sleep(rng.uniform(0.0, 0.8 * lasts_s))
        target = rng.choice([process.pid, *ranks_of(mark)])  # mpiexec, or a rank; or the only process
        with contextlib.suppress(ProcessLookupError):  # the run is over
            for each in sequence:
                os.kill(target, each)
                time.sleep(rng.choice([0.0, 0.001, 0.05]))
        began, case = time.time(), f"{i}: {sequence} to {'a rank' if target != process.pid else start[0]}"
        _, stderr = process.communicate(timeout=60)
        while ranks_of(mark) and time.time() < began + 60:
            time.sleep(0.02)
        if process.returncode == -signal.SIGHUP:
            assert launcher == "mpi" and number == signal.SIGHUP and target == process.pid, case
            killed.append(time.time() - began)
            continue
        if process.returncode:  # else the run was over
            assert process.returncode == code, (case, stderr)
            newest = max((parts / "checkpoints").glob("step-*"))
            durable.append((newest / "manifest.json").stat().st_mtime - began)
            subprocess.run(
                [*start, f"resume={parts.name}"], cwd=tmp_path, env=environment(), check=True, capture_output=True
            )
        assert same(whole, parts), case
        shutil.rmtree(parts)
    with capsys.disabled():
        print(
            f"\n{launcher}: 50 sequences, {len(durable)} saved after at most {max(durable):.2f} s, "
            f"{len(killed)} killed after at most {max(killed, default=0.0):.2f} s"
        )
    assert len(durable) + len(killed) > 40 and max([*durable, *killed]) < 5
