"""Folders that one process at a time has, however the last one ended."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupynet import lock
from cupynet.errors import ConfigError
from cupynet.lock import NAME, Hold, at_work


def left_by(folder: Path, pid: int, host: str) -> Path:
    (folder / NAME).write_text(json.dumps({"pid": pid, "host": host, "started": "2026-11-20 12:00:00"}))
    return folder / NAME


def dead() -> int:
    """The number of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_folder_is_one_process_s_until_it_leaves(tmp_path: Path) -> None:
    assert not at_work(tmp_path)
    hold = Hold(tmp_path)
    assert (hold.found, hold.warning) == (None, "") and at_work(tmp_path)
    who = rf"process {os.getpid()} on {platform.node()}, since 20.*"
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: a run is going on there \({who}\): let it end, stop it, or "):
        Hold(tmp_path)
    hold.release()
    hold.release()
    assert list(tmp_path.iterdir()) == [] and not at_work(tmp_path)
    assert "cupynet-heart" not in [thread.name for thread in threading.enumerate()]
    Hold(tmp_path).release()


def test_what_a_killed_process_held_is_free(tmp_path: Path) -> None:
    code = f"import time; from cupynet.lock import Hold; hold = Hold(__import__('pathlib').Path({str(tmp_path)!r}))"
    with subprocess.Popen([sys.executable, "-c", f"{code}; print(1, flush=True); time.sleep(60)"], stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert at_work(tmp_path)
        child.send_signal(signal.SIGKILL)
    assert not at_work(tmp_path) and (tmp_path / NAME).exists()
    hold = Hold(tmp_path)
    assert hold.found is not None and hold.found.pid == child.pid and hold.warning == ""
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    hold.release()


def test_a_process_of_another_machine_lives_as_long_as_its_heart_beats(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "SILENT_S", 1.0)
    path, dies = left_by(tmp_path, 1, "n01"), threading.Event()

    def beat() -> None:
        while not dies.wait(0.05):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        assert at_work(tmp_path)
        with pytest.raises(
            ConfigError, match=r"a run is going on there \(process 1 on n01, since 2026-11-20 12:00:00\)"
        ):
            Hold(tmp_path)
    finally:
        dies.set()
        heart.join()
    assert not at_work(tmp_path)
    hold = Hold(tmp_path)
    assert hold.found is not None and hold.found.host == "n01"
    hold.release()


def test_the_heart_beats_while_a_folder_is_held(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    hold = Hold(tmp_path)
    os.utime(tmp_path / NAME, (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / NAME).stat().st_mtime > 0
    hold.release()


def no_locks(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("there", [True, False])
def test_without_locks_a_run_goes_on_and_says_so(tmp_path: Path, monkeypatch, there: bool) -> None:
    monkeypatch.setattr(lock, "SILENT_S", 0.3)
    if there:
        monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    else:
        monkeypatch.setattr(lock, "fcntl", None)
    hold = Hold(tmp_path)
    assert "no locks here" in hold.warning
    hold.release()
    assert list(tmp_path.iterdir()) == []
    for pid in (dead(), os.getpid()):  # the second lives, and is another process than it was: its heart is silent
        left_by(tmp_path, pid, platform.node())
        hold = Hold(tmp_path)
        assert hold.found is not None and hold.found.pid == pid
        hold.release()


def test_a_folder_that_cannot_be_written_has_no_lock(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "nowhere")
    assert "nothing keeps a second run out" in hold.warning and "No such file" in hold.warning
    hold.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\0" * 100, "[" * 10000])
def test_a_file_that_says_nothing_belongs_to_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert not at_work(tmp_path)
    hold = Hold(tmp_path)
    assert hold.found is None
    hold.release()


def test_a_forked_process_and_a_new_folder_of_that_name_are_left_alone(tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    hold._pid += 1  # as a forked process sees it
    hold.release()
    assert at_work(tmp_path)
    (tmp_path / "run").mkdir()
    mine = Hold(tmp_path / "run")
    (tmp_path / "run" / NAME).unlink()
    others = Hold(tmp_path / "run")  # somebody removed the folder, and began another
    mine.release()
    assert at_work(tmp_path / "run")
    others.release()


def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr(lock, "_POLL_S", 0.0)
    inside, most, got = [], [0], [0]

    def come() -> None:
        for _ in range(60):
            try:
                hold = Hold(tmp_path)
            except ConfigError:
                continue
            inside.append(1)
            most[0], got[0] = max(most[0], len(inside)), got[0] + 1
            inside.pop()
            hold.release()

    threads = [threading.Thread(target=come) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and got[0] > 6
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_written_through_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / NAME).symlink_to("victim")
    assert Hold(tmp_path).warning.endswith("nothing keeps a second run out of this folder") and not at_work(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"
    (tmp_path / NAME).unlink()
    os.mkfifo(tmp_path / NAME)
    assert not at_work(tmp_path)
