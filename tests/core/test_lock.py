"""Locks on folders: one process at a time, no matter how the last one ended."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import filelock
import pytest

from cupynet.core import lock
from cupynet.core.errors import ConfigError
from cupynet.core.lock import NAME, Hold, at_work


def test_one_of_many_simultaneous_threads_gets_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    inside, most = list[int](), list[int]()

    def come(_: int) -> None:
        for _ in range(60):
            with suppress(ConfigError):
                hold = Hold(tmp_path)
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                hold.release()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(come, range(6)))
    assert max(most) == 1 and len(most) > 6
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_locked_until_its_holder_releases_it(tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    assert hold.warning == "" and at_work(tmp_path)
    with pytest.raises(ConfigError):
        Hold(tmp_path)
    holder = json.loads((tmp_path / NAME).read_text())
    assert (holder["pid"], holder["host"]) == (os.getpid(), platform.node())
    (tmp_path / NAME).write_text(json.dumps({**holder, "pid": 12345}))
    with pytest.raises(ConfigError, match=f"process 12345 on {platform.node()}"):
        Hold(tmp_path)
    hold.release()
    hold.release()
    assert list(tmp_path.iterdir()) == [] and not at_work(tmp_path)
    Hold(tmp_path).release()


HOLDING = """
import pathlib, sys, time
from cupynet.core.lock import Hold
hold = Hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_can_be_taken(tmp_path: Path) -> None:
    line = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        assert at_work(tmp_path)
        child.send_signal(signal.SIGKILL)
    assert not at_work(tmp_path) and (tmp_path / NAME).exists()
    hold = Hold(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    hold.release()


def test_a_forked_process_does_not_release_the_lock(tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    child = os.fork()
    if child == 0:
        hold.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and at_work(tmp_path) and (tmp_path / NAME).exists()
    hold.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's existence is not used as a lock instead, because it would outlive a killed process."""

    def no_locks(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(2):
        hold = Hold(tmp_path)
        assert os.strerror(number) in hold.warning
        hold.release()
        assert not at_work(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x"}', "[" * 10000])
def test_the_content_of_a_lock_file_does_not_matter(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    assert not at_work(tmp_path)
    Hold(tmp_path).release()
    with lock._file_lock(tmp_path / NAME), pytest.raises(ConfigError):
        (tmp_path / NAME).write_text(text)
        Hold(tmp_path)


def test_probing_a_lock_does_not_take_it(tmp_path: Path) -> None:
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            at_work(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            for _ in range(20):
                (tmp_path / NAME).touch()
                Hold(tmp_path).release()
        finally:
            ended.set()
        asking.result()


def test_a_lock_file_that_is_a_link_is_not_written_through_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / NAME).symlink_to("victim")
    assert Hold(tmp_path).warning and not at_work(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"
    (tmp_path / NAME).unlink()
    os.mkfifo(tmp_path / NAME)
    assert not at_work(tmp_path)
    with pytest.raises(ConfigError):
        Hold(tmp_path)


def test_a_lock_file_is_removed_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were removed later, it could already be the next process's file."""
    there, release = [], filelock.FileLock.release

    def look(lock: filelock.FileLock, force: bool = False) -> None:
        there.append(Path(lock.lock_file).exists())
        release(lock, force)

    monkeypatch.setattr(filelock.FileLock, "release", look)
    Hold(tmp_path).release()
    assert there and not any(there)
