"""The page that a run writes at its end, however it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.config import compose
from cupynet.core.errors import ConfigError
from cupynet.data import Dataset
from cupynet.nn import Dense, Image, Model, Sequential
from cupynet.reporting import ReportPage
from cupynet.training import History, ParallelWrapper
from cupynet.training.callbacks.base import Callback
from tests.support import warm
from tests.support.resumed_runs import FAULT, FAULTY

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


def environment(**more: str) -> dict[str, str]:
    hidden = {"CUPYNET_DATA", "CUPYNET_REPORT"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PYTHONPATH": str(ROOT), "CUPYNET_OFFLINE": "1", **more}


def train(folder: Path, *settings: str, code: int = 0, **more: str) -> str:
    """Train with a page; return what was printed."""
    done = warm.command("cupynet", ("train", *QUICK, *settings), folder, environment(**more), 300, **more)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs of a sweep, and what was printed."""
    folder = tmp_path_factory.mktemp("sweep")
    output = train(folder, "-m", "epochs=1,2", f"hydra.sweep.dir={folder}/runs")
    return [folder / "runs" / number for number in "01"], output


def test_each_run_of_a_sweep_has_its_page(finished):
    runs, output = finished
    assert "warning" not in output
    for epochs, folder in enumerate(runs, 1):
        text = (folder / "report.html").read_text()
        assert f"{epochs} of {epochs}" in text and "finished" in text and "<svg" in text
        assert "Most confident mistakes" in text and 'alt="sample ' in text
        assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert not list(folder.glob(".*.part"))


def test_the_page_of_a_resumed_run_is_rewritten_and_named_by_the_closing_table(finished):
    folder = finished[0][0]
    output = train(folder.parent, "resume=0", "epochs=2")
    assert re.search(r"^report +0/report.html$", output, re.MULTILINE)
    text = (folder / "report.html").read_text()
    assert "2 of 2" in text and "finished" in text


def test_a_signal_ends_the_run_with_a_page(tmp_path):
    (tmp_path / "fault.py").write_text(FAULT)
    train(tmp_path, *FAULTY, "hydra.run.dir=run", code=130, END_AFTER="5", END_BY="SIGINT")
    text = (tmp_path / "run" / "report.html").read_text()
    assert ">stopped<" in text and "SIGINT" in text


def test_a_run_that_diverges_says_so_on_its_page(tmp_path):
    train(tmp_path, "optimizer=sgd", "optimizer.learning_rate=1e30", f"hydra.run.dir={tmp_path}/run", code=3)
    text = (tmp_path / "run" / "report.html").read_text()
    assert ">diverged<" in text and "is not finite" in text


def fit(run: Path | None, *callbacks: Callback) -> None:
    images = np.random.default_rng(1).integers(0, 256, (40, 4, 4, 1)).astype(np.uint8)
    model = Model(Sequential([Dense(2)]), Image(4, 4, 1), create_backend("numpy"))
    with ParallelWrapper(model, workers=1, callbacks=callbacks, run=run) as wrapper:
        wrapper.fit(Dataset("small", images, np.arange(40) % 2, 2), 1)


def test_without_matplotlib_there_is_a_page_without_charts(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "cupynet")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fit(tmp_path, History(), ReportPage())
    assert caplog.text.count("charts need matplotlib: pip install 'cupynet[plots]'") == 1
    text = (tmp_path / "report.html").read_text()
    assert "charts need matplotlib" in text and "<svg" not in text and not (tmp_path / "curves.png").exists()


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "report.html" / "x").mkdir(parents=True)
    fit(tmp_path, History(), ReportPage())
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "cupynet report" in record.getMessage()


def test_no_page_without_a_folder_or_if_it_is_turned_off(tmp_path):
    fit(None, ReportPage())
    fit(tmp_path, ReportPage())  # nothing to show
    fit(tmp_path, History(), ReportPage(enabled=False))
    assert not list(tmp_path.glob("*.html"))
    with pytest.raises(ConfigError, match="enabled"):
        ReportPage(enabled=1)  # type: ignore[arg-type]


class Failing(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_fit_end(self, trainer: object) -> None:
        raise self.error


def test_a_bug_is_named_on_the_page_and_raised(tmp_path):
    with pytest.raises(ValueError, match="a bug"):
        fit(tmp_path, History(), ReportPage(), Failing(ValueError("a bug")))
    text = (tmp_path / "report.html").read_text()
    assert ">failed<" in text and "ValueError: a bug" in text


def test_an_interrupt_is_not_delayed_by_a_page(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, History(), ReportPage(), Failing(KeyboardInterrupt()))
    assert not list(tmp_path.glob("*.html"))


def test_the_environment_turns_it_off_for_all_runs(monkeypatch):
    for value in ("true", "false"):
        monkeypatch.setenv("CUPYNET_REPORT", value)
        assert compose(()).callbacks["report"]["enabled"] is (value == "true")
    assert compose(("callbacks.report=null",)).callbacks["report"] is None


def test_the_package_imports_nothing_that_draws_before_a_page_is_made():
    code = (
        "import sys, cupynet.training, cupynet.reporting.page\n"
        "print(sorted({'matplotlib', 'jinja2', 'hydra'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"
