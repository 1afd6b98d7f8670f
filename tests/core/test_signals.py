"""Signals: the first one ends a run soon with a checkpoint, the next one ends it at once."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cupynet.core import signals
from cupynet.core.errors import Interrupted
from cupynet.core.mpiexec import find_mpiexec
from tests.support.commands import QUICK, SMALL, environment, run
from tests.support.mpi import needs_mpi, ranks_of
from tests.support.resumed_runs import same

TINY = [*QUICK, *SMALL]
ALL = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)]


@pytest.mark.parametrize(("number", "code"), ALL)
def test_an_interruption_has_the_exit_code_of_its_signal(number: int, code: int) -> None:
    assert Interrupted(number).exit_code == code
    with pytest.raises(KeyboardInterrupt) as caught, signals.handled(signals.leave):
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert Interrupted.by(caught.value).exit_code == code


def test_a_signal_outside_a_job_is_reported_by_its_name_alone() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, signals.handled(signals.leave):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert str(Interrupted.by(caught.value)).endswith("SIGTERM")


@pytest.mark.parametrize("moment", ["import", "work"])
def test_a_signal_during_the_imports_or_the_work_of_any_command_ends_it_in_one_line(moment: str) -> None:
    done = python(f"""
import os, signal, sys, cupynet.__main__
from cupynet.core.exits import run_and_exit
class Command:
    def main():
        try:
            run_and_exit(lambda: os.kill(os.getpid(), signal.SIGHUP))
        finally:
            print("cleaned up")
def imported(name):
    if {moment == "import"}:
        os.kill(os.getpid(), signal.SIGHUP)
    return Command
cupynet.__main__.import_module, sys.argv = imported, ["cupynet", "plan"]
cupynet.__main__.main()
""")
    assert done.returncode == 143 and done.stderr.startswith("cupynet: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ("cleaned up\n" if moment == "work" else "")


def test_a_signal_during_a_destructor_which_ignores_exceptions_is_not_lost() -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    with pytest.raises(KeyboardInterrupt), signals.handled(signals.leave):
        Dying()
        time.sleep(5)


def test_signal_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
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


def python(code: str, *before: str) -> subprocess.CompletedProcess[str]:
    line = [*before, sys.executable, "-c", code]
    return subprocess.run(line, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize("code", [0, 3])
def test_a_signal_after_a_command_has_ended_does_not_change_its_exit_code(code: int) -> None:
    done = python(
        "import atexit, os, signal, sys, time; from types import SimpleNamespace; from cupynet import __main__\n"
        "atexit.register(lambda: [os.kill(os.getpid(), signal.SIGUSR1), time.sleep(5)])\n"
        f"command = SimpleNamespace(main=lambda: [print('done'), sys.exit({code})])\n"
        "__main__.import_module, sys.argv = lambda name: command, ['cupynet', 'plan']\n"
        "__main__.main()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


def test_a_command_ignores_sighup_under_nohup() -> None:
    code = "import os, signal; from cupynet.core import signals; "
    code += "signals.command(lambda: os.kill(os.getpid(), signal.SIGHUP) or print('done'))"
    assert python(code).returncode == 143
    assert python(code, "nohup").stdout == "done\n"


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


@pytest.mark.parametrize(("number", "code", "moment"), [(signal.SIGINT, 130, 0.06), (signal.SIGHUP, 143, 0.25)])
def test_a_signal_in_the_first_moments_ends_a_command_in_one_line(
    number: signal.Signals, code: int, moment: float, tmp_path: Path
) -> None:
    """The process has reached `main` by then. Slow imports come later."""
    line, pipe = [sys.executable, "-c", START, *TINY, "epochs=1000"], subprocess.PIPE
    with subprocess.Popen(line, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(moment)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    assert stderr.count("\n") == 1 and number.name in stderr, stderr


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

class Last(Callback):
    def on_iteration_end(self, trainer):
        if trainer.iteration == 19:
            os.kill(os.getpid(), signal.SIGHUP)
"""


def run_with(callback: str, folder: Path, code: int) -> tuple[str, str]:
    """Run with this callback in the folder `run`, and return stdout and stderr."""
    (folder / "fault.py").write_text(SECOND)
    fault = ["trusted_modules=[fault]", f"+callbacks.fault._target_=fault.{callback}"]
    return run(folder, *TINY, "workers=1", "hydra.run.dir=run", *fault, code=code)


def test_a_second_signal_ends_the_run_at_once_without_a_partial_checkpoint(tmp_path: Path) -> None:
    _, stderr = run_with("Second", tmp_path, 130)
    first, last = stderr.splitlines()
    assert "SIGTERM" in first and "SIGINT" in last
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_signal_in_the_last_round_leaves_a_complete_and_evaluated_run(tmp_path: Path) -> None:
    _, stderr = run_with("Last", tmp_path, 143)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "SIGHUP" in stderr.splitlines()[-1]
    assert summary["stop_reason"] is None and summary["test_accuracy"] is not None


LONG = [*TINY, "data.train=1200", "epochs=40", "log_every=10", "data.validation=40"]
FREQUENCIES = ["parallel.averaging_frequency=5", "parallel.averaging_frequency=end", "parallel=gradients"]


def interrupted(line: list[str], folder: Path, rng: random.Random, lasts_s: float) -> tuple[int, int, bool, float]:
    """Send a random signal to a run at a random moment after it has begun to train.

    SIGSTOP and SIGCONT may surround or follow the signal. Under mpiexec, all signals go to mpiexec or to one rank.

    Returns:
        The process's exit code, the signal's exit code, whether mpiexec received the signal, and when.
    """
    number, code = rng.choice(ALL)
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    sequence = rng.choice([(number,), (stop, number, go_on), (number, stop, go_on)])
    variables, pipe = environment(MARK=str(folder)), subprocess.PIPE
    line = [*line, f"hydra.run.dir={folder.name}"]
    process = subprocess.Popen(
        line, cwd=folder.parent, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    history = folder / "history.jsonl"
    while not (history.exists() and history.stat().st_size) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, 0.8 * lasts_s))
    target = rng.choice([process.pid, *ranks_of(str(folder))])  # mpiexec or a rank, or else the only process
    with contextlib.suppress(ProcessLookupError):  # the run has ended
        for each in sequence:
            os.kill(target, each)
            time.sleep(rng.choice([0.0, 0.001, 0.05]))
    sent = time.time()
    process.communicate(timeout=60)
    while ranks_of(str(folder)) and time.time() < sent + 60:
        time.sleep(0.02)
    return process.returncode, code, target == process.pid, sent


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["thread", pytest.param("mpi", marks=needs_mpi)])
def test_a_run_ended_by_signals_at_random_moments_resumes_bit_for_bit(tmp_path: Path, launcher: str) -> None:
    """Each gives a checkpoint within five seconds, from which the run resumes to the same result, bit for bit.

    Only SIGHUP to mpiexec ends it and all ranks at once.
    """
    rng, took_s = random.Random(7), list[float]()
    for i in range(50):
        workers, start = (1, 2, 4)[i % 3], [sys.executable, "-m", "cupynet", "train"]
        if launcher == "mpi":
            start = [find_mpiexec(), "-n", str(workers), *start]
        line = [*start, *LONG, FREQUENCIES[i % 3], f"workers={workers}", f"parallel.launcher={launcher}"]
        whole, parts = tmp_path / f"whole{i % 3}", tmp_path / f"parts{i}"
        if not whole.exists():
            finish(*line, f"hydra.run.dir={whole.name}", folder=tmp_path)
        lasts_s = json.loads((whole / "summary.json").read_text())["train_s"]
        code, expected, to_launcher, sent = interrupted(line, parts, rng, lasts_s)
        if code == -signal.SIGHUP:
            assert launcher == "mpi" and to_launcher, i
            took_s.append(time.time() - sent)
            continue
        if code:  # otherwise the run had ended
            assert code == expected, i
            newest = max((parts / "checkpoints").glob("step-*"))
            took_s.append((newest / "manifest.json").stat().st_mtime - sent)
            finish(*start, f"resume={parts.name}", folder=tmp_path)
        assert same(whole, parts), i
        shutil.rmtree(parts)
    assert len(took_s) > 40 and max(took_s) < 5


def finish(*line: str, folder: Path) -> None:
    subprocess.run(line, cwd=folder, env=environment(), check=True, capture_output=True)
