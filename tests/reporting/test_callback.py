"""The page that a run writes when it ends, successfully or not."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cupynet.core.errors import DivergedError
from cupynet.reporting import ReportPage
from cupynet.training import HistoryWriter, ParallelWrapper, StopReason
from cupynet.training.callbacks.base import Callback
from tests.support.pages import check_alone
from tests.support.resumed_runs import resumed, trained
from tests.support.training import On, StopAfter, small_dataset, small_model

QUICK = (
    *("data=synthetic", "data.train=300", "data.test=100", "workers=2", "batch_size=16", "backend=numpy", "model=mlp"),
    "callbacks.report.enabled=true",
)


def test_report_html_is_written_for_a_stopped_run_and_replaced_when_the_run_is_resumed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    trained(folder, *QUICK, "epochs=2", callbacks=[StopAfter(5, text="SIGINT", reason=StopReason.SIGNAL)])
    text = (folder / "report.html").read_text()
    assert ">stopped<" in text and "SIGINT" in text
    check_alone(text)
    resumed(folder)
    text = (folder / "report.html").read_text()
    assert "run/report.html" in capsys.readouterr().out
    assert "2 of 2" in text and "finished" in text and "<svg" in text and "SIGINT" not in text
    assert "Most confident mistakes" in text and 'alt="sample ' in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*.part"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def fit(run: Path | None, *callbacks: Callback) -> None:
    with ParallelWrapper(small_model(), workers=1, callbacks=callbacks, run=run) as wrapper:
        wrapper.fit(small_dataset(40), epochs=1)


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide matplotlib. Charts take most of the time needed to write a page."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_report_html_has_no_charts_without_matplotlib(
    tmp_path: Path, without_charts: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cupynet")
    fit(tmp_path, HistoryWriter(), ReportPage())
    assert caplog.text.count("cupynet[plots]") == 1
    text = (tmp_path / "report.html").read_text()
    assert "cupynet[plots]" in text and "<svg" not in text and not (tmp_path / "curves.png").exists()


def test_a_report_that_cannot_be_written_logs_one_warning(
    tmp_path: Path, without_charts: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "report.html" / "x").mkdir(parents=True)
    fit(tmp_path, HistoryWriter(), ReportPage())
    (record,) = caplog.records
    assert record.levelname == "WARNING"


def test_a_report_without_folder_or_history_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "run", HistoryWriter(), ReportPage(enabled=False))
    assert not caplog.records
    for folder in (None, tmp_path):
        caplog.clear()
        fit(folder, ReportPage())
        (record,) = caplog.records
        assert record.levelname == "WARNING"
    assert not list(tmp_path.glob("**/*.html"))


def failing(error: BaseException) -> Callback:
    return On("on_fit_end", Mock(side_effect=error))


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(("error", "state"), [(ValueError("mine"), "failed"), (DivergedError("mine"), "diverged")])
def test_report_html_of_a_failed_or_diverged_run_names_its_error(error: Exception, state: str, tmp_path: Path) -> None:
    with pytest.raises(type(error), match="^mine$"):
        fit(tmp_path, HistoryWriter(), ReportPage(), failing(error))
    text = (tmp_path / "report.html").read_text()
    assert f">{state}<" in text and ("ValueError: mine" if state == "failed" else "mine") in text
    check_alone(text)


def test_a_keyboard_interrupt_is_not_delayed_by_a_report(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, HistoryWriter(), ReportPage(), failing(KeyboardInterrupt()))
    assert not list(tmp_path.glob("*.html"))
