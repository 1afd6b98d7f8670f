"""Processes as workers: how they end when one of them fails, and who says so."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupynet.errors import ConfigError
from cupynet.parallel.mpi import library
from tests.mpi import needs_mpi, under_mpiexec

pytestmark = needs_mpi

SCRIPT = """
import atexit, os, signal, sys, time
import numpy as np
from cupynet.errors import DivergedError
from cupynet.mpiexec import started
from cupynet.parallel import MpiLauncher

kind, victim, turn = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "silent in MPI" and started()[0] == victim:  # registered first, it comes last
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP))

def deliberate_failure():
    raise ZeroDivisionError("on purpose")

def task(c):
    for now in range(100):
        if now == turn and kind == "alike":
            raise DivergedError("all of them alike")
        if now == turn and c.rank == victim:
            if kind == "raise":
                deliberate_failure()
            elif kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "silent":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "unlike":
                c.gather_numbers(now, now)
        c.gather_numbers(now)
        c.check()
    return "done"

def form_groups(c):
    groups = [c.split(0, -c.rank) for _ in range(2500)]  # MPI has some 2,000 and no more
    return int(groups[-1].gather_numbers(c.rank)[0, 0])

launcher = MpiLauncher(timeout_s=1.0 if "silent" in kind else 60.0)
result = launcher.run(form_groups if kind == "groups" else task)
if kind == "late" and launcher.first == victim:  # the others are on their way out already
    deliberate_failure()
if kind == "silent at the end" and launcher.first == victim:
    os.kill(os.getpid(), signal.SIGSTOP)
if result is not None:
    print(result, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, ranks: int, kind: str, victim: int = 1, turn: int = 20) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; fails the test where it takes so long that somebody must have hung."""
    began = time.monotonic()
    done = under_mpiexec(ranks, str(script), kind, str(victim), str(turn), cwd=script.parent, timeout=60)
    assert time.monotonic() - began < 50
    return done.returncode, done.stdout, done.stderr


def test_the_result_is_rank_0s_and_all_leave_together(script):
    assert run(script, 3, "none") == (0, "done\n", "")


def test_groups_are_formed_as_often_as_one_likes(script):
    assert run(script, 2, "groups") == (0, "1\n", "")


@pytest.mark.parametrize(("kind", "victim"), [("raise", 1), ("late", 0), ("late", 2)])
def test_the_one_that_raises_shows_its_traceback_and_ends_all(script, kind, victim):
    """In its task, or when the others have done all their work."""
    code, _, stderr = run(script, 3, kind, victim)
    assert code == 1
    assert stderr.count("Traceback") == 1 and "deliberate_failure" in stderr
    assert stderr.count("ZeroDivisionError: on purpose") == 1
    assert "PeerFailed" not in stderr and "MPI_Abort" not in stderr


def test_what_all_raise_alike_is_told_once_and_its_exit_code_kept(script):
    code, stdout, stderr = run(script, 3, "alike")
    assert (code, stdout) == (3, "")
    assert stderr.count("DivergedError: all of them alike") == 1


def test_a_rank_that_is_killed_ends_all(script):
    code, stdout, _ = run(script, 3, "kill")
    assert code != 0 and "done" not in stdout


def test_a_rank_that_is_silent_is_named(script):
    code, _, stderr = run(script, 3, "silent")
    assert code == 1
    assert stderr.count("worker 1 has not arrived where worker") == 1


def test_a_rank_that_never_comes_to_the_end_of_its_program_is_named(script):
    code, stdout, stderr = run(script, 3, "silent at the end")
    assert (code, stdout) == (1, "done\n")
    assert stderr.count("worker 1 has not come to the end of its program") == stderr.count("\n") == 1


def test_the_end_of_mpi_itself_is_not_waited_for_for_ever(script):
    code, stdout, _ = run(script, 2, "silent in MPI")
    assert code != 0 and stdout.startswith("done\n")


def test_what_is_longer_than_expected_is_told_as_different_calls(script):
    code, _, stderr = run(script, 2, "unlike")
    assert code == 1 and "the workers do not make the same calls" in stderr


BEGINNING = """
import os, signal, sys, time
from pathlib import Path
from cupynet.mpiexec import started
from cupynet.parallel import job, start

kind = sys.argv[1]
start.START_S = {"leaves": 1.0, "stopped": 2.0}.get(kind, 60.0)
if kind == "stopped":
    if started()[0] == 0:
        Path("pid.part").write_text(str(os.getpid()))
        os.rename("pid.part", "pid")
    else:
        while not os.path.exists("pid"):
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(int(Path("pid").read_text()), signal.SIGSTOP)
        time.sleep(3)
        os.kill(int(Path("pid").read_text()), signal.SIGCONT)
elif started()[0] == 1:
    time.sleep(0.5)  # the others are waiting already
    if kind == "leaves":
        sys.exit(0)
    sys.modules["mpi4py"] = None
job()
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("leaves", "cupynet: rank 0: not all 3 processes have come together within 1 s"),
        ("has no MPI", "ConfigError: launcher=mpi: MPI cannot be used"),
    ],
)
def test_who_cannot_come_ends_those_that_wait(tmp_path, kind, said):
    """Before MPI is up."""
    (tmp_path / "beginning.py").write_text(BEGINNING)
    done = under_mpiexec(3, "beginning.py", kind, cwd=tmp_path, timeout=50)
    assert done.returncode != 0 and done.stderr.count(said) == 1


def test_who_is_stopped_while_all_come_together_is_not_killed(tmp_path):
    (tmp_path / "beginning.py").write_text(BEGINNING)
    done = under_mpiexec(2, "beginning.py", "stopped", cwd=tmp_path, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


RESTORING = """
import sys
import numpy as np
from cupynet import ParallelWrapper, create_backend
from cupynet.errors import ConfigError, DataError
from cupynet.mpiexec import started
from cupynet.nn import Dense, Image, Model, Sequential

rng = np.random.default_rng(0)
pair = rng.integers(0, 256, (24, 4, 4, 1), np.uint8), rng.integers(0, 3, 24)
model = Model(Sequential({"output": Dense(3)}), Image(4, 4, 1), create_backend("numpy"), 1)
with ParallelWrapper(model, 2, launcher="mpi", timeout_s=20, progress="none") as wrapper:
    try:
        wrapper.restore("there" if started()[0] == 0 else "no folder of this machine")
    except (ConfigError, DataError) as error:
        said = f"{type(error).__name__}: {error}"
    wrapper.fit(pair, 1, batch_size=4)  # nothing there yet: a new training
    with open(f"said-{started()[0]}", "w") as file:
        file.write(said)
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_what_cannot_be_restored_is_refused_by_all(tmp_path, damaged):
    """Rank 0 alone reads checkpoints: the others would wait for what it is not going to send."""
    (tmp_path / "restoring.py").write_text(RESTORING)
    if damaged:
        (tmp_path / "there" / "step-00000001").mkdir(parents=True)
    done = under_mpiexec(2, "restoring.py", cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    first, second = ((tmp_path / f"said-{rank}").read_text() for rank in (0, 1))
    assert first == second and first.startswith("DataError: there" if damaged else "ConfigError: there: there is no")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_fifty_failures_at_random_moments_never_hang(script, kind, capsys):
    """At a random moment of the work, its beginning and its end included."""
    rng, tracebacks, longest = random.Random(11), 0, 0.0
    for _ in range(50):
        ranks, turn = rng.randint(2, 4), rng.randint(0, 99)
        began = time.monotonic()
        code, stdout, stderr = run(script, ranks, kind, rng.randrange(ranks), turn)
        longest = max(longest, time.monotonic() - began)
        assert code != 0 and "done" not in stdout
        tracebacks += stderr.count("Traceback") == 1 and "in deliberate_failure" in stderr
    with capsys.disabled():
        print(f"\n{kind}: 50 tries, 0 hangs, {tracebacks} with their own traceback, the longest {longest:.1f} s")
    assert tracebacks == (50 if kind == "raise" else 0)


def test_an_mpi_for_one_thread_at_a_time_is_refused(monkeypatch):
    found = SimpleNamespace(Query_thread=lambda: 2, THREAD_MULTIPLE=3)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=found))
    with pytest.raises(ConfigError, match="^launcher=mpi: this MPI lets one thread at a time call it, and two do"):
        library()
    found.Query_thread = lambda: 3
    assert library() is found
