"""Jobs of a sweep as processes of their own, some of them side by side.

What a job says on its terminal is passed on as far as it is a warning or an error; the rest stands in its log.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from cupynet import interrupts
from cupynet.exits import say_error
from cupynet.resume import PART
from cupynet.sweeps.shares import Share

WARNING = re.compile(r"\[\d\d:\d\d:\d\d\] (warning: .*)")
ERROR = re.compile(r"cupynet: (.*)")
POLL_S = 0.2
IMPATIENT = 3  # signals after which jobs are not asked any more


class Told(Protocol):
    """Who is told of jobs."""

    def began(self, number: int, overrides: Sequence[str], folder: Path) -> None:
        """A job begins."""

    def ended(self, number: int, code: int, error: str = "") -> object:
        """A job has ended, with an exit code, and why where that is not 0."""


class Command(NamedTuple):
    """A job: its number, what it is asked for, its folder, and the arguments of its process.

    own_devices: it names its devices itself, and is given none.
    """

    number: int
    overrides: Sequence[str]
    folder: Path
    arguments: Sequence[str]
    own_devices: bool = False


@dataclass
class _Running:
    """A process at work on a job."""

    command: Command
    process: subprocess.Popen[str]
    share: Share
    told: list[str]  # its errors


class SideBySide:
    """Does jobs, each as a process, as many at once as there are shares of the machine.

    Args:
        program: the words of a command line before its settings.
        sweep: is told when each begins and ends.
        shares: of the machine.

    Attributes:
        signal: that told all of it to end; 0 while none has.
    """

    def __init__(self, program: Sequence[str], sweep: Told, shares: Sequence[Share]) -> None:
        self.signal = 0
        self._program, self._sweep, self._free = list(program), sweep, list(shares)
        self._running: list[_Running] = []
        self._asked, self._passed_on = 0, 0  # signals

    def run(self, commands: Sequence[Command]) -> None:
        """All of them, in order; after a signal no more are begun, and those at work are told of it."""
        waiting, ended = list(commands), queue.Queue[_Running]()
        with interrupts.handled(self._interrupted):
            try:
                while self._running or (waiting and not self.signal):
                    while waiting and self._free and not self.signal:
                        self._start(waiting.pop(0), self._free.pop(0), ended)
                    with contextlib.suppress(queue.Empty):
                        self._end(ended.get(timeout=POLL_S))
                    self._pass_on()
            finally:
                for each in self._running:  # only where something failed here
                    each.process.kill()
                    each.process.wait()

    def _interrupted(self, number: int) -> None:
        self.signal, self._asked = self.signal or number, self._asked + 1
        if self._asked == 1:
            name = signal.Signals(number).name
            interrupts.say(f"cupynet: {name}: the jobs at work stop and save, no more begin; again: at once\n")

    def _pass_on(self) -> None:
        """Signals that came meanwhile, to each job as often: a terminal does not reach processes of other sessions."""
        while self._passed_on < self._asked:
            self._passed_on += 1
            number = signal.SIGKILL if self._passed_on >= IMPATIENT else self.signal
            for each in self._running:
                with contextlib.suppress(ProcessLookupError):
                    each.process.send_signal(number)

    def _start(self, command: Command, share: Share, ended: queue.Queue[_Running]) -> None:
        self._sweep.began(command.number, command.overrides, command.folder)
        environment = {**os.environ, **share.environment(devices=not command.own_devices), PART: "sweep"}
        with share.held():
            process = subprocess.Popen(
                [*self._program, *command.arguments], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        running = _Running(command, process, share, [])
        self._running.append(running)
        threading.Thread(target=_wait, args=(running, ended), name="cupynet-job", daemon=True).start()

    def _end(self, running: _Running) -> None:
        code = running.process.returncode
        error = running.told[-1] if running.told else ""
        if code < 0:
            with contextlib.suppress(ValueError):
                error = error or f"ended by {signal.Signals(-code).name}"
            code = 128 - code
        self._running.remove(running)
        self._free.append(running.share)
        if code and not running.told:
            say_error(f"job {running.command.number}: {error or f'ended with exit code {code}'}")
        self._sweep.ended(running.command.number, code, error)


def _wait(running: _Running, ended: queue.Queue[_Running]) -> None:
    """In a thread of its own: read what a job says until it has ended."""
    number, process = running.command.number, running.process
    with process:  # which closes its ends of the pipes
        errors = threading.Thread(target=_read_errors, args=(process.stderr, number, running.told), daemon=True)
        errors.start()
        for line in _lines(process.stdout):
            found = WARNING.fullmatch(line)
            if found is not None:
                with contextlib.suppress(OSError, ValueError):
                    print(f"job {number}: {found[1]}", flush=True)
        errors.join()
    ended.put(running)


def _read_errors(stream: IO[str] | None, number: int, told: list[str]) -> None:
    """Pass on what a job says on stderr: a traceback at once with the line that it belongs to."""
    above: list[str] = []
    for line in _lines(stream):
        found = ERROR.fullmatch(line)
        if found is None:
            above.append(line)
            continue
        _print_lines(above)
        above.clear()
        say_error(f"job {number}: {found[1]}")
        if not found[1].startswith("warning: "):
            told.append(found[1])
    _print_lines(above)


def _print_lines(lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)


def _lines(stream: IO[str] | None) -> Iterator[str]:
    for line in stream or ():
        yield line.rstrip("\n")
