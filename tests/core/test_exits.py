"""The output of commands: a terminal that is closed does not end a run, and errors are one line."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cupynet.__main__
from cupynet.core import signals
from cupynet.core.errors import ConfigError, DivergedError, annotate
from cupynet.core.exits import out_of_memory, tell
from cupynet.core.logs import Console
from cupynet.core.terminal import say_error
from tests.support import warm
from tests.support.commands import QUICK, ROOT, SMALL, environment, run, run_folder

TINY = [*QUICK, *SMALL]

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


def quick(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cupynet", "train", *TINY, "callbacks.progress.style=auto", "workers=1", *arguments]


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_opened_on_the_null_device(tmp_path, closed):
    """As under cron. A file opened later must not receive printed output."""
    file = tmp_path / "file"
    command = f'"$0" -c "$1" "$2" {closed} && cat "$2"'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, CLOSED, str(file)], env=environment(), capture_output=True, text=True,
        timeout=60, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert (done.returncode, file.read_text()) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii"])
def test_a_terminal_that_lacks_a_character_gets_a_replacement(tmp_path, encoding):
    """A bar on 80 columns is cut off with an ellipsis, which these encodings do not have."""
    folder = tmp_path / "Größe…"
    folder.mkdir()
    ours, theirs = pty.openpty()
    heard = bytearray()
    with subprocess.Popen(
        quick("epochs=2", f"hydra.run.dir='{folder}/run'"), cwd=tmp_path, stdout=theirs, stderr=theirs,
        env=environment(PYTHONIOENCODING=encoding, COLUMNS="80", TERM="xterm"),
    ) as child:  # fmt: skip
        os.close(theirs)
        listener = threading.Thread(target=listen, args=(ours, heard))
        listener.start()
        assert child.wait(120) == 0, heard.decode(encoding)
    listener.join(10)
    os.close(ours)
    text = heard.decode(encoding)
    assert "epoch 2" in text and "Traceback" not in text and "Gr??e?" in text
    assert (folder / "run" / "summary.json").is_file()


def listen(descriptor: int, heard: bytearray) -> None:
    """All that comes out of a terminal, until nobody holds its other end."""
    try:
        while chunk := os.read(descriptor, 4096):
            heard += chunk
    except OSError:  # so it ends on Linux
        pass


def train_to(stdout: str, folder: Path, *arguments: str) -> warm.Done:
    """Train with this terminal or named pipe as stdout."""
    settings = ["train", *TINY, "callbacks.progress.style=auto", "workers=1", *arguments]
    return warm.command("cupynet", settings, folder, environment(TERM="xterm"), 120, stdout=stdout)


def test_a_terminal_that_is_closed_during_training(tmp_path):
    """As under nohup, where SIGHUP does not reach the process. The bar is given up once, or is no longer drawn."""
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(train_to, os.ttyname(theirs), tmp_path, "epochs=4")
        heard = b""
        while b"epoch 1/" not in heard:
            heard += os.read(ours, 4096)
        os.close(theirs)
        os.close(ours)
        assert (ended.result().returncode, ended.result().stderr) == (0, "")
    folder = run_folder(tmp_path)
    assert (folder / "summary.json").is_file()
    log = (folder / "train.log").read_text()
    assert log.count("bar failed") <= 1 and "epoch 4/" in log


def test_a_closed_pipe_on_stdout_does_not_end_a_run(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(train_to, str(pipe), tmp_path, "epochs=3")
        with pipe.open() as heard:
            heard.readline()
        assert (ended.result().returncode, ended.result().stderr) == (0, "")
    assert (run_folder(tmp_path) / "summary.json").is_file()


def test_messages_to_a_full_disk_are_dropped(monkeypatch):
    record = logging.LogRecord("cupynet", logging.INFO, "", 0, "text", (), None)
    fault = logging.LogRecord("cupynet", logging.ERROR, "", 0, "text", (), None)
    closed = io.StringIO()
    closed.close()
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        for stream in (full, closed):
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            Console().emit(record)
            Console().emit(fault)
            say_error("text", ValueError("x"))
            assert tell(ConfigError("x")) == 2
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()


# Memory ---------------------------------------------------------------------------------------------------------------


class OutOfMemoryError(Exception):
    """As CuPy names its own."""


class CUDARuntimeError(RuntimeError):
    """Likewise."""


@pytest.mark.parametrize("command", ["compare", "doctor"], ids=str)
def test_a_wrong_option_is_refused_in_one_line(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cupynet", command, "--speed"])
    with pytest.raises(SystemExit) as left:
        cupynet.__main__.main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1


def test_which_errors_mean_out_of_memory():
    try:
        np.empty(1 << 58)
    except MemoryError as error:
        numpys: MemoryError = error
    others = [
        MemoryError(),
        numpys,
        OutOfMemoryError("Out of memory allocating 512 bytes"),
        CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ]
    assert all(out_of_memory(error) for error in others)
    usual = [RuntimeError("x"), OSError(errno.EACCES, "x"), ValueError("MemoryError"), ConfigError("out of memory")]
    assert not any(out_of_memory(error) for error in usual)


def test_out_of_memory_is_no_bug(capsys):
    error = OutOfMemoryError("Out of memory\nallocating 512 bytes")
    annotate(error, "worker 1, epoch 2, at batch 7")
    assert tell(error) == 1 and tell(MemoryError()) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "worker 1, epoch 2, at batch 7" in first and "MemoryError" in second


def test_an_error_of_ours_has_its_worker_and_batch_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = DivergedError("the loss is nan")
    annotate(error, "worker 1, epoch 2, at batch 7")
    assert tell(error) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("worker 1, epoch 2, at batch 7")


def test_a_full_disk_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(OSError(errno.ENOSPC, "No space left on device")) == 74
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_job_raises_besides_our_errors_is_reported_with_its_traceback(capsys):
    """A callback may raise KeyboardInterrupt, too. The handlers of a command add the number of the signal."""
    errors = {BrokenPipeError(32, "not on stdout"): 1, SystemExit(0): 1, SystemExit(7): 7}
    errors |= {KeyboardInterrupt(): 130, KeyboardInterrupt("enough"): 130}
    with signals.handled(signals.leave):
        for error, code in errors.items():
            assert tell(error, job="job 1: ") == code
            err = capsys.readouterr().err
            assert err.startswith(type(error).__name__) and "SIGINT" not in err  # the traceback of what was not raised
        assert tell(KeyboardInterrupt(signal.SIGTERM), job="job 1: ") == 143
        assert capsys.readouterr().err.count("\n") == 1


def test_a_run_out_of_memory_says_what_to_lower(tmp_path):
    """In one of two workers, in the middle of training."""
    (tmp_path / "greedy.py").write_text(
        "import numpy\n"
        "from cupynet import Callback\n"
        "class Greedy(Callback):\n"
        "    every_rank = True\n"
        "    def on_iteration_end(self, trainer):\n"
        "        if trainer.rank == 1:\n"
        "            self.all_of_it = numpy.empty(1 << 58)\n"
    )
    greedy = ["trusted_modules=[greedy]", "+callbacks.greedy._target_=greedy.Greedy"]
    _, stderr = run(tmp_path, *TINY, "workers=2", *greedy, code=1)
    (line,) = stderr.splitlines()
    assert "2.00 EiB" in line and "worker 1" in line and "batch_size" in line
    assert "Traceback" not in (Path(run_folder(tmp_path)) / "train.log").read_text()


def test_text_from_files_cannot_control_the_terminal(capsys):
    evil = "a\x1b[2J\x07\u202eb"
    say_error(evil, ValueError(evil))
    for level in (logging.INFO, logging.ERROR):
        Console().emit(logging.LogRecord("cupynet", level, "", 0, "%s", (evil,), None))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert "\ufffd" in text and not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_crash_of_native_code_prints_where_it_was() -> None:
    code = "import ctypes; from cupynet.core import terminal; terminal.steady_streams(); ctypes.string_at(0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr


def test_the_module_of_the_user_is_named_and_cupynet_is_not(capsys) -> None:
    """An error raised in cupynet is not attributed to the user's module that called it."""
    for cause, named in (
        (lambda: 1 / 0, True),
        (lambda: np.zeros(2).reshape(3), True),
        (lambda: annotate(1, ""), False),
    ):
        try:
            cause()
        except Exception as error:
            assert tell(error) == 1
        assert capsys.readouterr().err.endswith(f" (in module {__name__})\n") == named


@pytest.mark.parametrize(("word", "expected"), [("--help", 141), ("--version", 141), ("nothing", 2)])
def test_a_closed_stdout_ends_help_without_a_traceback(
    word: str, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["cupynet", word])
    closed = os.fdopen(writer, "w")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr("sys.stdout", closed)
        cupynet.__main__.main()
    closed.close()  # its descriptor leads to the null device now
    assert left.value.code == expected and "Traceback" not in capsys.readouterr().err
