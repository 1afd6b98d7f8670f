"""Jobs as processes side by side: their share of the machine, their output, their ends, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cupynet.backend import available_cores, usable_cores
from cupynet.sweeps import shares as shares_module
from cupynet.sweeps.processes import Command, SideBySide
from cupynet.sweeps.shares import VISIBLE, Share, shares

HELD = hasattr(os, "sched_setaffinity")


class Told:
    """Notes what it is told, with the jobs that were at work at each moment."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int, str]] = []
        self.at_work: set[int] = set()
        self.most = 0

    def began(self, number: int, overrides: Sequence[str], folder: Path) -> None:
        self.at_work.add(number)
        self.most = max(self.most, len(self.at_work))
        self.events.append(("began", number, 0, " ".join(overrides)))

    def ended(self, number: int, code: int, error: str = "") -> None:
        self.at_work.remove(number)
        self.events.append(("ended", number, code, error))

    @property
    def ends(self) -> dict[int, tuple[int, str]]:
        return {number: (code, error) for kind, number, code, error in self.events if kind == "ended"}


def work(texts: Sequence[str], at_once: int, folder: Path) -> tuple[Told, SideBySide]:
    """Does Python programs as jobs."""
    told = Told()
    beside = SideBySide([sys.executable, "-c"], told, shares(at_once, len(texts), ()))
    beside.run([Command(number, [f"n={number}"], folder, [text]) for number, text in enumerate(texts)])
    return told, beside


def test_as_many_as_there_are_shares_work_at_once(tmp_path: Path) -> None:
    met = "import pathlib, time, sys\np = pathlib.Path(sys.argv[1])\np.joinpath(sys.argv[2]).touch()\n"
    met += (
        "end = time.monotonic() + 30\nwhile len(list(p.iterdir())) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
    )
    met += "sys.exit(0 if time.monotonic() < end else 9)"
    told = Told()
    beside = SideBySide([sys.executable, "-c"], told, shares(2, 4, ()))
    beside.run([Command(n, [f"n={n}"], tmp_path, [met, str(tmp_path), str(n)]) for n in range(4)])
    assert told.most == 2 and told.ends == dict.fromkeys(range(4), (0, "")) and beside.signal == 0
    assert [number for kind, number, *_ in told.events if kind == "began"] == [0, 1, 2, 3]


def test_one_that_fails_ends_no_other_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = "import sys; print('[10:00:00] epoch 1'); print('[10:00:00] warning: careful'); "
    fails += "print('cupynet: loss is nan', file=sys.stderr); sys.exit(3)"
    bug = (
        "import sys; print('Traceback', file=sys.stderr); print('cupynet: this is a bug: x', file=sys.stderr); exit(1)"
    )
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    warned = "import sys; print('cupynet: warning: no log', file=sys.stderr)"
    told, _ = work([fails, bug, killed, warned, "exit(7)"], 1, tmp_path)
    assert told.ends == {
        0: (3, "loss is nan"), 1: (1, "this is a bug: x"), 2: (137, "ended by SIGKILL"), 3: (0, ""), 4: (7, ""),
    }  # fmt: skip
    out, err = capsys.readouterr()
    assert out == "job 0: warning: careful\n"  # nothing else of what they said
    assert err.splitlines() == [
        "cupynet: job 0: loss is nan",
        "Traceback",
        "cupynet: job 1: this is a bug: x",
        "cupynet: job 2: ended by SIGKILL",
        "cupynet: job 3: warning: no log",
        "cupynet: job 4: ended with exit code 7",
    ]


PATIENT = """
import signal, sys, time
told = []
def react(number, frame):
    told.append(number)
    if len(told) == 2: sys.exit(99)
signal.signal(signal.SIGTERM, react)
print("[10:00:00] warning: ready", flush=True)
end = time.monotonic() + 30
while not told and time.monotonic() < end: time.sleep(0.01)
if len(sys.argv) > 1:
    while time.monotonic() < end: time.sleep(0.01)
sys.exit(143)
"""


def signalled(count: int, capsys: pytest.CaptureFixture[str]) -> threading.Thread:
    """Sends SIGTERM to this process `count` times, once two jobs are at work."""

    def send() -> None:
        deadline, seen = time.monotonic() + 30, ""
        while seen.count("ready") < 2 and time.monotonic() < deadline:
            seen += capsys.readouterr().out
            time.sleep(0.02)
        for _ in range(count):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            time.sleep(0.6)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(("count", "stubborn", "code"), [(1, False, 143), (2, True, 99)])
def test_a_signal_reaches_all_jobs_and_no_more_begin(
    count: int, stubborn: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    beside = SideBySide([sys.executable, "-c"], told, shares(2, 3, ()))
    sender = signalled(count, capsys)
    more = ["stubborn"] if stubborn else []
    beside.run([Command(n, [f"n={n}"], tmp_path, [PATIENT, *more]) for n in range(3)])
    sender.join()
    assert {number: end[0] for number, end in told.ends.items()} == {0: code, 1: code}
    assert beside.signal == signal.SIGTERM and told.at_work == set()


def test_a_third_signal_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deaf = PATIENT.replace("sys.exit(99)", "pass")
    told = Told()
    beside = SideBySide([sys.executable, "-c"], told, shares(2, 2, ()))
    sender = signalled(3, capsys)
    beside.run([Command(n, [], tmp_path, [deaf, "stubborn"]) for n in range(2)])
    sender.join()
    assert told.ends == dict.fromkeys(range(2), (137, "ended by SIGKILL"))


def children() -> set[str]:
    """Processes that this one has started and not waited for, where the system tells."""
    found = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
    return set(found.read_text().split()) if found.is_file() else set()


def test_a_job_that_cannot_be_started_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, asked = subprocess.Popen, []

    def scarce(words: list[str], **how: object) -> object:
        asked.append(words)
        if len(asked) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(words, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", scarce)
    told, _ = work(["import time; time.sleep(0.3)"] * 3, 2, tmp_path)
    said = "cannot be started (Resource temporarily unavailable)"
    assert told.ends == {0: (0, ""), 1: (1, said), 2: (0, "")}
    assert capsys.readouterr().err == f"cupynet: job 1: {said}\n"


ORPHANED = """
import signal, sys, time
from cupynet import interrupts
def work():
    with interrupts.handled(lambda number: sys.exit(100 + number)):
        print("[10:00:00] warning: ready", flush=True)
        time.sleep(60)
try:
    interrupts.command(work)
except SystemExit as left:
    open(sys.argv[1], "w").write(str(left.code))
"""
KILLED = f"""
import sys
from cupynet.sweeps.processes import Command, SideBySide
from cupynet.sweeps.shares import Share
class Told:
    def began(self, *_): pass
    def ended(self, *_): pass
SideBySide([sys.executable, "-c"], Told(), [Share()]).run([Command(0, [], None, [{ORPHANED!r}, sys.argv[1]])])
"""


def test_jobs_stop_and_save_when_who_began_them_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path / "told")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as sweep:
        assert sweep.stdout is not None and b"ready" in sweep.stdout.readline()
        sweep.kill()
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.05)
    assert (tmp_path / "told").read_text() == f"{100 + signal.SIGTERM}"


def test_nothing_is_left_of_the_jobs(tmp_path: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if HELD else 0
    before = os.sched_getaffinity(0) if HELD else None
    others = children()
    work(["print('x' * 100000)"] * 3, 2, tmp_path)
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    if HELD:
        assert len(os.listdir("/proc/self/fd")) == files and os.sched_getaffinity(0) == before
    assert children() <= others


# shares ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "usable_cores", lambda: set(range(10, 18)))
    monkeypatch.setattr(shares_module, "available_cores", lambda: 8)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)


def test_cores_are_shared_out_whole(eight_cores: None) -> None:
    assert [share.cores for share in shares(3, 9, ())] == [(10, 11), (12, 13, 14), (15, 16, 17)]
    assert [share.cores for share in shares(None, 9, ())] == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert len(shares(3, 2, ())) == 2 and [share.cores for share in shares(1, 5, ())] == [tuple(range(10, 18))]
    assert [share.cores[0] for share in shares(10, 10, ())] == [*range(10, 18), 10, 11]
    assert str(shares(2, 2, ())[0]) == "4 cores" and str(Share(cores=(1,), devices=(0, 2))) == "2 devices and 1 core"


def test_devices_are_shared_out_whole(eight_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    parts = shares(None, 9, (0, 1, 2, 3))
    assert [part.devices for part in parts] == [(0,), (1,), (2,), (3,)] and [len(part.cores) for part in parts] == [
        2
    ] * 4
    assert [part.devices for part in shares(2, 9, (0, 1, 2))] == [(0,), (1, 2)]
    assert [part.devices for part in shares(3, 9, (0, 1))] == [(0,), (1,), (0,)]
    assert parts[2].environment() == {VISIBLE: "2"} and parts[2].environment(devices=False) == {}
    monkeypatch.setenv(VISIBLE, "4,5,GPU-6,7")  # what this process sees are some of the machine's
    assert [part.environment()[VISIBLE] for part in parts] == ["4", "5", "GPU-6", "7"]


def test_where_cores_cannot_be_had_blas_is_told(eight_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    share = shares(4, 9, ())[0]
    assert share.cores == () and share.environment() == {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    with share.held():
        pass


@pytest.mark.skipif(not HELD, reason="no process can be held to some cores here")
def test_a_process_is_held_to_its_cores_from_the_beginning(tmp_path: Path) -> None:
    first = min(usable_cores())
    text = f"import os; exit(0 if os.sched_getaffinity(0) == {{{first}}} else 5)"
    told = Told()
    SideBySide([sys.executable, "-c"], told, [Share(cores=(first,))]).run([Command(0, [], tmp_path, [text])])
    assert told.ends == {0: (0, "")} and available_cores() <= len(usable_cores())
