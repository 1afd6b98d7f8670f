"""Two machines on one: what is there without root, and with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from cupynet import machines
from cupynet.errors import Interrupted
from tests.mpi import needs_mpi
from tests.test_train import QUICK, run, run_folder


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_mpi)])
def test_two_machines_train_together(tmp_path, mark):
    """With root each is a network of its own; without it, or where the kernel has none, two groups of processes."""
    stdout, _ = run(tmp_path, "--rate", "200mbit", *QUICK, command="machines")
    assert json.loads((run_folder(tmp_path) / "summary.json").read_text())["workers"] == 2
    if "two groups of processes" not in stdout:
        assert "a cable of 200mbit" in stdout and "through the cable: " in stdout
        assert "cupynet-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_both_ends_of_the_cable_are_waited_for(monkeypatch):
    """Linux can be late in saying that they carry; MPI looks once, and finds no network."""
    states = {end: ["down", "lowerlayerdown", "up"] for end in "ab"}
    monkeypatch.setattr(machines.os, "geteuid", lambda: 0)
    monkeypatch.setattr(machines, "do", lambda *command, **more: None)
    monkeypatch.setattr(machines.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(machines, "cable", lambda namespace, what: states[namespace[-1]].pop(0))
    with machines.machines("1mbit", "1ms"):
        assert states == {"a": [], "b": []}


def test_a_cable_that_never_carries_is_not_waited_for_long(monkeypatch):
    seconds = count()
    monkeypatch.setattr(machines, "cable", lambda *_: "down")
    monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    with pytest.raises(OSError, match="the cable of one carries nothing after 5 s"):
        machines.until_up("one")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_machines_are_made_takes_them_down(monkeypatch, number):
    commands: list[tuple[str, ...]] = []

    def do(*command: str, **_: object) -> None:
        commands.append(command)
        if command[-1] == "up" or command[2] == "del":  # and a second one while they are taken down
            os.kill(os.getpid(), number)

    monkeypatch.setattr(machines.os, "geteuid", lambda: 0)
    monkeypatch.setattr(machines, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(machines, "do", do)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {number.name}"):
        machines.train("1mbit", "1ms", 1, [])
    made, removed = (
        [command[3] for command in commands if command[2] == word and command[1] == "netns"] for word in ("add", "del")
    )
    assert made[:2] == removed and len(set(removed)) == 2
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("number", "handed_on"), [(signal.SIGHUP, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_a_command_is_handed_the_signals_that_come(tmp_path, number, handed_on):
    up = tmp_path / "up"
    child = (
        f"import signal, sys, time; signal.signal({int(handed_on)}, lambda *_: sys.exit(7)); "
        f"open({str(up)!r}, 'w').close()"
    )

    def send() -> None:
        while not up.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert machines.follow([sys.executable, "-c", f"{child}\nwhile True: time.sleep(0.02)"], dict(os.environ)) == 7


def test_no_ranks_are_refused(tmp_path):
    _, stderr = run(tmp_path, "--ranks", "0", command="machines", code=2)
    assert stderr == "cupynet: --ranks=0: must be an integer of at least 1\n"


def test_wrong_settings_are_refused_before_there_are_machines(tmp_path):
    stdout, stderr = run(tmp_path, "workers=0", "hydra.run.dir=here", command="machines", code=2)
    assert stderr == "cupynet: workers=0: must be an integer of at least 1, or null for one per device\n"
    assert stdout == ""


@pytest.mark.parametrize("setting", ["resume=latest", "+resume=there", "--cfg=job"])
def test_what_each_rank_reads_by_itself_is_left_to_the_ranks(monkeypatch, setting):
    """The settings of a run that is gone on with are stored there; a question is answered, and nothing trains."""

    def composed(*_: object) -> None:
        raise AssertionError(setting)

    commands: list[list[str]] = []
    monkeypatch.setattr(machines, "compose", composed)
    monkeypatch.setattr(machines.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machines, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(machines, "follow", lambda command, _: commands.append(command) or 0)
    assert machines.train("1mbit", "1ms", 1, [setting]) == 0
    assert commands[0][-1] == setting
