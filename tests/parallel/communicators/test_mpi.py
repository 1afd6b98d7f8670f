"""MPI ranks: how they end when one of them fails, and which one reports it."""

import random
import re
from pathlib import Path

import pytest

from tests.support.mpi import needs_mpi, under_mpiexec

pytestmark = needs_mpi

FAILING = """
import os, signal, sys
from cupynet.core.errors import DivergedError
from cupynet.parallel import MpiLauncher

kind, victim, turn = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRORS = {
    "raise": ZeroDivisionError("on purpose"),
    "diverge": DivergedError("one alone"),
    "exit": SystemExit(7),
    "interrupt": KeyboardInterrupt(signal.SIGTERM),
}

def fail():
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRORS:
        raise ERRORS[kind]

def task(c):
    for now in range(100):
        if now == turn and kind == "alike":
            raise DivergedError("all of them alike")
        if now == turn and c.rank == victim:
            fail()
        c.gather_numbers(now)
        c.check()
    groups = [c.split(0, -c.rank) for _ in range(2100 if kind == "groups" else 1)]
    return int(groups[-1].gather_numbers(c.rank)[0, 0])

launcher = MpiLauncher(timeout_s=1.0 if kind == "stop" else 60.0)
result = launcher.run(task)
if turn == 100 and launcher.first == victim:  # the others are on their way out already
    fail()
if result is not None:
    print("done", result, flush=True)
"""


def ended(folder: Path, program: str, *arguments: object, ranks: int = 2) -> tuple[int, str, str]:
    """Return the ranks' exit code, stdout and stderr, or raise TimeoutExpired if they hang."""
    (folder / "program.py").write_text(program)
    done = under_mpiexec(ranks, "program.py", *map(str, arguments), cwd=folder, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("victim", "turn"), [(1, 20), pytest.param(2, 100, marks=pytest.mark.slow)])
def test_a_rank_that_raises_shows_the_only_traceback_and_ends_all_ranks(tmp_path: Path, victim: int, turn: int) -> None:
    """The rank raises in its task, or after the others have finished all their work."""
    code, _, stderr = ended(tmp_path, FAILING, "raise", victim, turn, ranks=3)
    assert code == 1
    assert stderr.count("Traceback") == stderr.count("ZeroDivisionError: on purpose") == 1
    assert "in fail" in stderr


@pytest.mark.parametrize(
    ("kind", "code", "tracebacks"),
    [
        ("diverge", 3, 1),
        pytest.param("alike", 3, 1, marks=pytest.mark.slow),
        pytest.param("exit", 7, 0, marks=pytest.mark.slow),
        pytest.param("interrupt", 143, 1, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_with_the_exit_code_of_the_failed_one(
    tmp_path: Path, kind: str, code: int, tracebacks: int
) -> None:
    found, stdout, stderr = ended(tmp_path, FAILING, kind, 1, 20)
    assert (found, stdout, stderr.count("Traceback")) == (code, "", tracebacks)


def test_a_rank_that_is_killed_ends_all_ranks(tmp_path: Path) -> None:
    code, stdout, _ = ended(tmp_path, FAILING, "kill", 1, 20)
    assert code != 0 and "done" not in stdout


@pytest.mark.parametrize("turn", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_rank_that_stops_responding_ends_all_ranks_after_timeout_s(tmp_path: Path, turn: int) -> None:
    """The rank stops in its task or at the end of its program, and one of the others reports that it waited."""
    code, stdout, stderr = ended(tmp_path, FAILING, "stop", 1, turn, ranks=3)
    assert (code, "done" in stdout) == (1, turn == 100)
    assert stderr.count("parallel.timeout_s") == 1 and re.search("worker [02] waited ", stderr)


def test_groups_of_the_same_ranks_are_made_once(tmp_path: Path) -> None:
    """MPICH supports about 2,048 communicators, but each worker splits 2,100 times."""
    code, stdout, _ = ended(tmp_path, FAILING, "groups", 1, 20)
    assert (code, stdout) == (0, "done 1\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "kill", "stop"])
def test_ranks_never_hang_when_one_fails_at_a_random_moment(tmp_path: Path, kind: str) -> None:
    rng = random.Random(11)
    for _ in range(50):
        ranks, turn = rng.randint(2, 3), rng.randint(0, 99)
        code, stdout, stderr = ended(tmp_path, FAILING, kind, rng.randrange(ranks), turn, ranks=ranks)
        assert code != 0 and "done" not in stdout
        assert stderr.count("Traceback") == (kind != "kill")


REFUSED = """
from cupynet import ParallelWrapper, create_backend
from cupynet.core.mpiexec import started
from cupynet.nn import Dense, Image, Model, Sequential

model = Model(Sequential({"output": Dense(3)}), Image(4, 4, 1), create_backend("numpy"), 1)
with ParallelWrapper(model, 2, launcher="mpi", timeout_s=20, progress="none") as wrapper:
    wrapper.restore("missing" if started()[0] == 0 else "no folder of this machine")
"""


def test_a_checkpoint_that_does_not_exist_ends_all_ranks_with_exit_code_2(tmp_path: Path) -> None:
    """Only rank 0 reads checkpoints. The others must not wait for one that it cannot send."""
    code, _, stderr = ended(tmp_path, REFUSED)
    assert code == 2 and stderr.count("Error: missing: ") == 1


DIFFERENT = """
import sys
from cupynet import SGD, Model, ParallelWrapper
from cupynet.core.mpiexec import rank
from cupynet.nn import Dense
from tests.support.training import small_dataset

other = [sys.argv[1] if rank() else ""]
model = Model([Dense(3)], (8, 8, 1), "numpy", dtype="double" if "dtype" in other else "float")
optimizer = SGD(0.2) if "rate" in other else SGD(0.1)
frequency = 2 if "frequency" in other else 3
options = {"launcher": "mpi", "timeout_s": 20, "progress": "none"}
with ParallelWrapper(model, 2, frequency, optimizer=optimizer, **options) as wrapper:
    wrapper.fit(small_dataset(40), epochs=1 + ("epochs" in other), batch_size=4)
"""


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("rate", "optimizer"),
        pytest.param("frequency", "synchronizer", marks=pytest.mark.slow),
        pytest.param("epochs", "epochs", marks=pytest.mark.slow),
        pytest.param("dtype", "dtype", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_different_arguments_end_with_exit_code_2(tmp_path: Path, argument: str, named: str) -> None:
    code, _, stderr = ended(tmp_path, DIFFERENT, argument)
    assert code == 2 and stderr.count(f"Error: {named}") == 1


STARTING = """
import sys, time
from cupynet.core.mpiexec import started
from cupynet.parallel import job
from cupynet.parallel.launchers import mpi

if sys.argv[1] == "leaves":
    mpi.START_S = 1.0
if started()[0] == 1:
    time.sleep(0.1)  # the others are waiting already
    if sys.argv[1] == "leaves":
        sys.exit(0)
    sys.modules["mpi4py"] = None
job()
"""


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("has no MPI", "pip install 'cupynet[mpi]'"), pytest.param("leaves", "in library", marks=pytest.mark.slow)],
)
def test_a_rank_that_cannot_start_mpi_ends_the_waiting_ranks(tmp_path: Path, kind: str, shown: str) -> None:
    code, _, stderr = ended(tmp_path, STARTING, kind)
    assert code != 0 and shown in stderr
