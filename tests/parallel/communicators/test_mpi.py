"""Ranks of MPI: how they end when one of them fails, and which of them reports it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.mpi import needs_mpi, under_mpiexec

pytestmark = needs_mpi

SCRIPT = """
import os, signal, sys
from cupynet.core.errors import DivergedError
from cupynet.parallel import MpiLauncher

kind, victim, turn = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def deliberate_failure():
    raise ZeroDivisionError("on purpose")

def fail():
    if kind == "raise":
        deliberate_failure()
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "diverge":
        raise DivergedError("one alone")
    elif kind == "exit":
        sys.exit(7)
    elif kind == "interrupt":
        raise KeyboardInterrupt(signal.SIGTERM)

def task(c):
    for now in range(100):
        if now == turn and kind == "alike":
            raise DivergedError("all of them alike")
        if now == turn and c.rank == victim:
            fail()
        c.gather_numbers(now)
        c.check()
    groups = [c.split(0, -c.rank) for _ in range(2100 if kind == "groups" else 1)]  # MPI has 2,048 and no more
    return int(groups[-1].gather_numbers(c.rank)[0, 0])

launcher = MpiLauncher(timeout_s=1.0 if kind == "stop" else 60.0)
result = launcher.run(task)
if turn == 100 and launcher.first == victim:  # the others are on their way out already
    fail()
if result is not None:
    print("done", result, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, ranks: int, kind: str, victim: int = 1, turn: int = 20) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; fails the test if it takes so long that a rank must have hung."""
    done = under_mpiexec(ranks, str(script), kind, str(victim), str(turn), cwd=script.parent, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("victim", "turn"), [(1, 20), pytest.param(2, 100, marks=pytest.mark.slow)])
def test_the_rank_that_raises_shows_its_traceback_and_ends_all(script, victim, turn):
    """In its task, or when the others have done all their work."""
    code, _, stderr = run(script, 3, "raise", victim, turn)
    assert code == 1
    assert stderr.count("Traceback") == 1 and "in deliberate_failure" in stderr
    assert stderr.count("ZeroDivisionError: on purpose") == 1


@pytest.mark.parametrize(
    ("kind", "code", "shown"),
    [
        ("diverge", 3, 1),
        pytest.param("alike", 3, 1, marks=pytest.mark.slow),
        pytest.param("exit", 7, 0, marks=pytest.mark.slow),
        pytest.param("interrupt", 143, 1, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_with_the_exit_code_of_the_failed_one(script, kind, code, shown):
    found, stdout, stderr = run(script, 2, kind)
    assert (found, stdout) == (code, "")
    assert stderr.count("Traceback") == shown


def test_a_rank_that_is_killed_ends_all(script):
    code, stdout, _ = run(script, 2, "kill")
    assert code != 0 and "done" not in stdout


def test_groups_of_the_same_ranks_are_made_once(script):
    """MPI has 2,048 communicators and no more; each worker splits 2,100 times."""
    code, stdout, _ = run(script, 2, "groups")
    assert (code, stdout) == (0, "done 1\n")


@pytest.mark.parametrize("turn", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_rank_that_stops_responding_ends_all(script, turn):
    """In its task, or instead of coming to the end of its program: one rank says which one waited."""
    code, stdout, stderr = run(script, 3, "stop", 1, turn)
    assert (code, "done" in stdout) == (1, turn == 100)
    assert stderr.count(" waited 1 s for ") == stderr.count("parallel.timeout_s") == 1


TOGETHER = """
import os, signal, time
from pathlib import Path
from cupynet.parallel import MpiLauncher

NUMBERS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
for number in NUMBERS:
    signal.signal(number, lambda number, frame: Path(f"heard-{number}").touch())

def task(c):
    processes = c.gather_numbers(os.getpid())[:, 0]
    if c.rank == 1:
        time.sleep(0.5)  # the other one waits already
        for number in NUMBERS:
            os.kill(int(processes[0]), number)
            while not os.path.exists(f"heard-{number}"):
                time.sleep(0.01)
        Path("sent").touch()
    c.barrier()
    return f"done {int(c.split(0, -c.rank).gather_numbers(c.rank)[0, 0])}"

result = MpiLauncher(timeout_s=20).run(task)
if result is not None:
    print(result)
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of two ranks that succeed, and their process."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "together.py").write_text(TOGETHER)
    return folder, under_mpiexec(2, "together.py", cwd=folder, timeout=60)


def test_rank_0_returns_the_result(together):
    _, done = together
    assert (done.returncode, done.stdout) == (0, "done 1\n")


def test_a_waiting_rank_handles_signals(together):
    """The rank it waits for joins after the signals have been handled."""
    assert (together[0] / "sent").exists()


REFUSED = """
from cupynet import ParallelWrapper, create_backend
from cupynet.core.mpiexec import started
from cupynet.nn import Dense, Image, Model, Sequential

model = Model(Sequential({"output": Dense(3)}), Image(4, 4, 1), create_backend("numpy"), 1)
with ParallelWrapper(model, 2, launcher="mpi", timeout_s=20, progress="none") as wrapper:
    wrapper.restore("missing" if started()[0] == 0 else "no folder of this machine")
"""


def test_all_ranks_refuse_a_bad_checkpoint(tmp_path):
    """Rank 0 alone reads checkpoints; the others must not wait for one that it cannot send."""
    (tmp_path / "refused.py").write_text(REFUSED)
    done = under_mpiexec(2, "refused.py", cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and done.stderr.count("Error: missing: there is no checkpoint") == 1


BEGINNING = """
import os, sys, time
from cupynet.core.mpiexec import started
from cupynet.parallel import job
from cupynet.parallel.launchers import mpi as ranks

kind = sys.argv[1]
if kind == "leaves":
    ranks.START_S = 1.0
if started()[0] == 1:
    time.sleep(0.1)  # the others are waiting already
    if kind == "leaves":
        sys.exit(0)
    sys.modules["mpi4py"] = None
job()
"""


@pytest.mark.parametrize(
    ("kind", "shown"),
    [pytest.param("leaves", "in library", marks=pytest.mark.slow), ("has no MPI", "pip install 'cupynet[mpi]'")],
)
def test_a_rank_that_cannot_start_mpi_ends_the_waiting_ranks(tmp_path, kind, shown):
    (tmp_path / "beginning.py").write_text(BEGINNING)
    done = under_mpiexec(2, "beginning.py", kind, cwd=tmp_path, timeout=50)
    assert done.returncode != 0 and shown in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "kill", "stop"])
def test_fifty_failures_at_random_moments_never_hang(script, kind):
    """At a random moment of the work, its beginning and its end included."""
    rng = random.Random(11)
    report = {"raise": "in deliberate_failure", "kill": "", "stop": " waited 1 s for "}[kind]
    for _ in range(50):
        ranks, turn = rng.randint(2, 3), rng.randint(0, 99)
        code, stdout, stderr = run(script, ranks, kind, rng.randrange(ranks), turn)
        assert code != 0 and "done" not in stdout
        assert report in stderr and stderr.count("Traceback") == (kind != "kill")
