"""The process that keeps a page fresh: that it is there, takes little, and ends, however the run does."""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.checks import integer
from cupynet.config import compose
from cupynet.data import Dataset
from cupynet.errors import ConfigError
from cupynet.nn import Dense, Image, Model, Sequential
from cupynet.report import follow
from cupynet.report.follow import Pace
from cupynet.training import ParallelWrapper, ReportPage
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "data=synthetic",
    "data.train=300",
    "data.test=100",
    "workers=2",
    "batch_size=16",
    "backend=numpy",
    "model=mlp",
)
WAITS_S = 120.0  # on a machine with more to do than cores
EAGER = ("callbacks.report.niceness=0", f"callbacks.report.wait_s={WAITS_S}")  # tests compete with each other


def environment(**more: str) -> dict[str, str]:
    hidden = {"CUPYNET_DATA", "CUPYNET_REPORT"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PYTHONPATH": str(ROOT), "CUPYNET_OFFLINE": "1", **more}


def command(*settings: str) -> list[str]:
    return [sys.executable, "-m", "cupynet.train", *QUICK, *EAGER, *settings]


def train(folder: Path, *settings: str, code: int = 0, **more: str) -> str:
    """A run with a page; what it printed."""
    done = warm.command("cupynet.train", (*QUICK, *EAGER, *settings), folder, environment(**more), 300, **more)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def following(folder: Path) -> list[int]:
    """The processes that keep a page below `folder` fresh."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "cupynet.report" in words and any(word.startswith(str(folder)) for word in words):
            found.append(int(path.parent.name))
    return found


def until(what: Callable[[], object], why: str) -> None:
    deadline = time.monotonic() + WAITS_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def shows(page: Path, text: str) -> bool:
    return page.is_file() and text in page.read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs of a sweep, and what was printed."""
    folder = tmp_path_factory.mktemp("sweep")
    told = train(folder, "-m", "epochs=1,2", f"hydra.sweep.dir={folder}/runs")
    return [folder / "runs" / number for number in "01"], told


def test_each_run_of_a_sweep_has_its_page_and_leaves_no_process(finished):
    runs, told = finished
    assert "warning" not in told
    for epochs, folder in enumerate(runs, 1):
        text = (folder / "report.html").read_text()
        assert (
            f"{epochs} of {epochs}" in text
            and "finished" in text
            and "<svg" in text
            and 'http-equiv="refresh"' not in text
        )
        assert "Most confident mistakes" in text and 'alt="sample ' in text
        assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert not list(folder.glob(".*.part"))
        assert not following(folder)


def test_a_run_that_goes_on_has_its_page_anew(finished):
    folder = finished[0][0]
    before = (folder / "report.html").read_text()
    train(folder, f"resume={folder}", "epochs=2")
    text = (folder / "report.html").read_text()
    assert "1 of 1" in before and "2 of 2" in text and "finished" in text
    assert not following(folder)


@pytest.fixture
def going_on(tmp_path):
    """A run that goes on until a signal, whose page says so; it is killed at the end."""
    process = subprocess.Popen(
        command("epochs=100000", f"hydra.run.dir={tmp_path}/run", "report_every_iterations=5"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: shows(tmp_path / "run" / "report.html", 'http-equiv="refresh"'), "no page")
        yield process, tmp_path / "run"
    finally:
        process.kill()
        process.wait()


def test_a_page_says_that_its_run_was_killed(going_on):
    process, folder = going_on
    assert 1 <= len(following(folder)) <= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: shows(folder / "report.html", "ended without a result"), "the page says that it goes on")
    until(lambda: not following(folder), "the process that draws is still there")
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()


def test_ctrl_c_ends_the_run_and_not_its_page(going_on):
    process, folder = going_on
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(WAITS_S) == 130
    assert shows(folder / "report.html", "SIGINT") and shows(folder / "report.html", "stopped")
    assert not following(folder)


def test_a_run_that_fails_says_so_on_its_page(tmp_path):
    told = train(
        tmp_path, "epochs=3", "optimizer=sgd", "optimizer.learning_rate=1e30", f"hydra.run.dir={tmp_path}/run", code=3
    )
    page = tmp_path / "run" / "report.html"
    until(lambda: shows(page, ">diverged<"), told)
    until(lambda: not following(tmp_path), "the process that draws is still there")


def test_a_page_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path):
    (tmp_path / "run" / "report.html" / "x").mkdir(parents=True)
    told = train(tmp_path, "epochs=1", f"hydra.run.dir={tmp_path}/run")
    assert told.count("the report page is given up: ") == 1 and "report.html: cannot be written" in told
    assert (tmp_path / "run" / "summary.json").is_file()


def test_without_matplotlib_there_is_a_page_without_charts(tmp_path):
    (tmp_path / "lacking" / "matplotlib").mkdir(parents=True)
    (tmp_path / "lacking" / "matplotlib" / "__init__.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join([str(tmp_path / "lacking"), str(ROOT)])
    told = train(tmp_path, "epochs=1", f"hydra.run.dir={tmp_path}/run", PYTHONPATH=path)
    line = "charts need matplotlib: pip install 'cupynet[plots]'"
    assert told.count(line) == 1 and "warning" not in told
    text = (tmp_path / "run" / "report.html").read_text()
    assert "charts need matplotlib" in text and "finished" in text and "<svg" not in text
    assert not (tmp_path / "run" / "curves.png").exists()


def data() -> Dataset:
    images = np.random.default_rng(1).integers(0, 256, (40, 4, 4, 1)).astype(np.uint8)
    return Dataset("small", images, np.arange(40) % 2, 2)


def wrapper(page: ReportPage, run: Path | None) -> ParallelWrapper:
    model = Model(Sequential([Dense(2)]), Image(4, 4, 1), create_backend("numpy"))
    return ParallelWrapper(model, workers=1, callbacks=[page], run=run)


def test_without_a_folder_nothing_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with wrapper(ReportPage(), None) as made:
        made.fit(data(), 1)


def test_nothing_is_started_where_it_is_turned_off(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with wrapper(ReportPage(enabled=False), tmp_path) as made:
        made.fit(data(), 1)


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_environment_turns_it_off_for_all_runs(monkeypatch, value):
    monkeypatch.setenv("CUPYNET_REPORT", value)
    assert compose(()).callbacks["report"]["enabled"] is (value == "true")
    assert compose(("callbacks.report=null",)).callbacks["report"] is None


WRONG = {
    "a process that cannot be started": "print = 1 / 0",
    "one that ends at once": "raise SystemExit(7)",
    "one that talks nonsense": "print('nonsense')",
}


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_whatever_fails_there_is_one_warning(tmp_path, monkeypatch, caplog, program):
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: real([sys.executable, "-c", program], **how))
    with wrapper(ReportPage(wait_s=WAITS_S), tmp_path) as made:
        made.fit(data(), 3)
    (line,) = [record.getMessage() for record in caplog.records if "page" in record.getMessage()]
    assert line.startswith("the report page is given up: ") and f"cupynet.report {tmp_path} makes it" in line


def test_an_interpreter_that_is_not_there_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with wrapper(ReportPage(), tmp_path) as made:
        made.fit(data(), 1)
    assert [record.levelname for record in caplog.records if "page" in record.getMessage()] == ["WARNING"]


def test_a_page_that_takes_long_is_not_waited_for(tmp_path, monkeypatch, caplog):
    real, started = subprocess.Popen, []

    def slow(words: list[str], **how: object) -> object:
        started.append(real([sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(60)"], **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", slow)
    began = time.monotonic()
    with wrapper(ReportPage(wait_s=0.2), tmp_path) as made:
        made.fit(data(), 1)
    took = time.monotonic() - began
    (child,) = started
    assert child.poll() is None and took < 30
    assert "is not ready after 0.2 s: it comes later" in caplog.text
    child.kill()
    child.wait()


def test_many_open_files_are_no_hindrance(tmp_path, monkeypatch, caplog):
    """Of a notebook, or of many shards: `select` knows none beyond 1023."""
    real, (soft, hard) = subprocess.Popen, resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda words, **how: real([sys.executable, "-c", "import sys; sys.stdin.read(); print('done')"], **how),
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard) if hard > 0 else 2048, hard))
    opened = []
    try:
        opened += [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        with wrapper(ReportPage(), tmp_path) as made:
            made.fit(data(), 1)
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "page" not in caplog.text


def test_a_process_that_does_not_listen_delays_nothing(tmp_path, monkeypatch):
    """More is told than a pipe holds, and nobody reads it."""
    real, started = subprocess.Popen, []

    def deaf(words: list[str], **how: object) -> object:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", deaf)
    page = ReportPage(wait_s=0.0)
    with wrapper(page, tmp_path) as made:
        made.fit(data(), 1)
        began = time.monotonic()
        for _ in range(100_000):
            page.on_report(made.trainer, None)  # type: ignore[arg-type]
        assert time.monotonic() - began < 30  # it would be the minute that the other sleeps
    started[0].kill()
    started[0].wait()


def test_niceness_and_patience_are_checked():
    for wrong in ({"niceness": 20}, {"niceness": -1}, {"wait_s": -1}, {"enabled": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ReportPage(**wrong)  # type: ignore[arg-type]
    assert integer("x", ReportPage().niceness, 19) == 19


def test_pages_take_their_share_of_the_time_and_no_more(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(share=0.01, first_s=3)
    assert pace.wait_s() == 3
    now[0] += 4
    assert pace.wait_s() == 0
    pace.spend(0.2)
    assert pace.wait_s() == pytest.approx(19)  # of the 20 that this is a hundredth of
    now[0] += 15
    assert pace.wait_s() == pytest.approx(4)
    now[0] += 4
    assert pace.wait_s() == 0


def test_drawing_needs_nothing_that_computes():
    """What a page costs is paid while a run trains: numba and Hydra take longer to import than a page to make."""
    code = (
        "import sys, cupynet.report.follow; print(sorted({'numba', 'hydra', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_the_first_page_is_of_a_run_that_has_begun_and_puts_off_no_figures():
    made = queue.Queue()

    class Slow:
        def make(self, *, draw, picture):
            until = time.process_time() + 0.05  # after which the next would be due in half a minute
            while time.process_time() < until:
                pass
            made.put(draw)

    here, there = os.pipe()
    working = threading.Thread(target=follow._meanwhile, args=(Slow(), here))
    working.start()
    try:
        time.sleep(0.2)
        assert made.empty()  # nobody has said that there is anything to show
        for _ in range(2):
            os.write(there, b"\n")
            assert made.get(timeout=5) is False
    finally:
        os.close(there)
        working.join(10)
        os.close(here)
