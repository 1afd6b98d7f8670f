"""Output of commands: a closed terminal does not end a run, and errors are one line."""

import errno
import io
import logging
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cupynet.core import signals
from cupynet.core.errors import ConfigError, DivergedError, annotate
from cupynet.core.exits import out_of_memory, report_error
from cupynet.core.logs import Console
from cupynet.core.terminal import say_error
from tests.support import warm
from tests.support.commands import QUICK, SMALL, environment, run_folder

OutOfMemoryError = type("OutOfMemoryError", (Exception,), {})  # these two are named like CuPy's errors
CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
TINY = [*QUICK, *SMALL, "callbacks.progress.style=auto", "workers=1", "backend=numpy"]


def record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("cupynet", level, "", 0, "%s", (text,), None)


CLOSED = """
import os, sys
from cupynet.core.terminal import steady_streams
steady_streams()
print("discarded")
print("discarded", file=sys.stderr)
assert not sys.stdin.read() and not sys.stdout.isatty() and not sys.stderr.isatty()
assert os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) > 2
os.write(1, b"discarded")
os.write(2, b"discarded")
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stdin_stdout_or_stderr_is_opened_on_the_null_device(closed: str, tmp_path: Path) -> None:
    """Streams may be closed under cron. A file opened later must not receive printed output."""
    file = tmp_path / "file"
    line = ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, CLOSED, str(file)]
    done = subprocess.run(line, env=environment(), timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, file.read_text()) == (0, "")


def test_a_character_that_the_terminal_lacks_is_replaced(tmp_path: Path) -> None:
    """A bar that does not fit 80 columns is cut off with an ellipsis, which ASCII lacks."""
    folder = tmp_path / "Größe…"
    line = [sys.executable, "-m", "cupynet", "train", *TINY, "epochs=2", f"hydra.run.dir='{folder}'"]
    variables = environment(PYTHONIOENCODING="ascii", COLUMNS="80", TERM="xterm")
    ours, theirs = pty.openpty()
    heard = bytearray()
    with subprocess.Popen(line, cwd=tmp_path, stdout=theirs, stderr=theirs, env=variables) as child:
        os.close(theirs)
        with suppress(OSError):  # raised when the last process has closed the terminal
            while chunk := os.read(ours, 4096):
                heard += chunk
    os.close(ours)
    text = heard.decode("ascii")
    assert child.returncode == 0 and "epoch 2" in text and "Gr??e?" in text
    assert (folder / "summary.json").is_file()


def test_training_continues_after_its_terminal_is_closed(tmp_path: Path) -> None:
    """SIGHUP does not reach the process, as under nohup. At most one message says that the bar has failed."""
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as pool:
        variables, line = environment(TERM="xterm"), ["train", *TINY, "epochs=4"]
        ended = pool.submit(warm.command, "cupynet", line, tmp_path, variables, 120, stdout=os.ttyname(theirs))
        heard = b""
        while b"epoch 1/" not in heard:
            heard += os.read(ours, 4096)
        os.close(theirs)
        os.close(ours)
    assert (ended.result().returncode, ended.result().stderr) == (0, "")
    log = (run_folder(tmp_path) / "train.log").read_text()
    assert log.count("bar failed") <= 1 and "epoch 4/" in log


def test_messages_to_a_full_disk_or_a_closed_stream_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    full = open("/dev/full", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    for stream in (full, closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            Console().emit(record(logging.INFO, "text"))
            Console().emit(record(logging.ERROR, "text"))
            say_error("text", ValueError("x"))
            assert report_error(ConfigError("x")) == 2
    with pytest.raises(OSError):
        full.close()


def test_logged_and_reported_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07\u202eb"
    say_error(evil, ValueError(evil))
    for level in (logging.INFO, logging.ERROR):
        Console().emit(record(level, evil))
    for text in capsys.readouterr():
        assert "\ufffd" in text and not {"\x1b", "\x07", "\u202e"} & set(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("Out of memory allocating 512 bytes"), True),
        (CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (RuntimeError("x"), False),
        (OSError(errno.EACCES, "x"), False),
        (ConfigError("out of memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_mean_out_of_memory_are_recognized(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfMemoryError("Out of memory\nallocating 512 bytes"), 1),
        (MemoryError(), 1),
        (DivergedError("the loss is nan"), 3),
        (OSError(errno.ENOSPC, "No space left on device"), 74),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_expected_error_is_one_line_with_its_worker_and_batch(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    annotate(error, "worker 1, epoch 2, at batch 7")
    assert report_error(error) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert ("worker 1, epoch 2, at batch 7" in line) == (code != 74)  # output belongs to no batch


def test_an_unexpected_error_of_a_job_has_its_traceback_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Callbacks may raise KeyboardInterrupt too. A command's signal handlers add the signal number to theirs."""
    errors = {BrokenPipeError(32, "not on stdout"): 1, SystemExit(0): 1, SystemExit(7): 7, KeyboardInterrupt(): 130}
    with signals.handled(signals.leave):
        for error, code in errors.items():
            assert report_error(error, job="job 1: ") == code
            err = capsys.readouterr().err
            assert err.startswith(type(error).__name__) and "SIGINT" not in err  # a traceback without frames
        assert report_error(KeyboardInterrupt(signal.SIGTERM), job="job 1: ") == 143
        assert capsys.readouterr().err.count("\n") == 1
