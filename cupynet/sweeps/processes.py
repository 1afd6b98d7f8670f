"""Jobs of a sweep as processes of their own, some of them side by side.

What a job says on its terminal is passed on as far as it is a warning or an error; the rest stands in its log.
"""

from __future__ import annotations

import contextlib
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from cupynet import interrupts
from cupynet.exits import say_error
from cupynet.sweeps.jobs import HandedOn, begun, came_to
from cupynet.sweeps.shares import Share

WARNING = re.compile(r"\[\d\d:\d\d:\d\d\] (warning: .*)")
ERROR = re.compile(r"cupynet: (.*)")
POLL_S = 0.2


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
    """

    def __init__(self, program: Sequence[str], sweep: Told, shares: Sequence[Share]) -> None:
        self._signals = HandedOn("the jobs at work stop and save, no more begin")
        self._program, self._sweep, self._free = list(program), sweep, list(shares)
        self._running: list[_Running] = []
        self._lifeline: tuple[int, ...] = ()

    @property
    def signal(self) -> int:
        """That told all of it to end; 0 while none has."""
        return self._signals.first

    def run(self, commands: Sequence[Command]) -> None:
        """All of them, in order; after a signal no more are begun, and those at work are told of it."""
        waiting, ended = list(commands), queue.Queue[_Running]()
        with interrupts.handled(self._signals), interrupts.lifeline() as self._lifeline:
            try:
                while self._running or (waiting and not self.signal):
                    while waiting and self._free and not self.signal:
                        self._start(waiting.pop(0), self._free.pop(0), ended)
                    with contextlib.suppress(queue.Empty):
                        self._end(ended.get(timeout=POLL_S))
                    self._signals.hand_on(each.process.send_signal for each in self._running)
            finally:
                for each in self._running:  # only where something failed here
                    each.process.kill()
                    each.process.wait()

    def _start(self, command: Command, share: Share, ended: queue.Queue[_Running]) -> None:
        self._sweep.began(command.number, command.overrides, command.folder)
        environment = share.environment(devices=not command.own_devices)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        if self._lifeline:
            environment[interrupts.LIFELINE], how["pass_fds"] = str(self._lifeline[0]), self._lifeline
        try:
            process = begun([*self._program, *command.arguments], share, environment, **how)
        except OSError as error:  # no room for one more process now: the others are worth what they have done
            self._free.append(share)
            said = f"cannot be started ({error.strerror})"
            say_error(f"job {command.number}: {said}")
            self._sweep.ended(command.number, 1, said)
            return
        running = _Running(command, process, share, [])
        self._running.append(running)
        threading.Thread(target=_wait, args=(running, ended), name="cupynet-job", daemon=True).start()

    def _end(self, running: _Running) -> None:
        code, ended_by = came_to(running.process)
        error = running.told[-1] if running.told else ended_by
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
