"""Processes that work for this one: how they begin and end, and hear of signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupynet import interrupts

if TYPE_CHECKING:
    from cupynet.sweeps.shares import Share

IMPATIENT = 3  # signals after which processes are not asked any more


def begun(words: Sequence[str], share: Share, environment: Mapping[str, str], **how: Any) -> subprocess.Popen[Any]:
    """A process in its share of the machine, and in a session of its own: Ctrl-C on the terminal does not reach it.

    how: what else `Popen` is told. OSError where none can be started.
    """
    with share.held():
        return subprocess.Popen(
            words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, start_new_session=True, **how
        )


def came_to(process: subprocess.Popen[Any]) -> tuple[int, str]:
    """The exit code of a process that has ended, that of shells after a signal, and which that was, else ""."""
    code = process.returncode
    if code >= 0:
        return code, ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return 128 - code, f"ended by {name}"


class HandedOn:
    """Signals that tell this process to end, each handed on to those that work for it; a third one ends those at once.

    Args:
        said: what the first one leads to.

    Attributes:
        first: which it was; 0 while none has come.
    """

    def __init__(self, said: str) -> None:
        self.first, self._said = 0, said
        self._came = self._handed_on = 0

    def __call__(self, number: int) -> None:
        """One has come: a handler for `interrupts.handled`."""
        self.first, self._came = self.first or number, self._came + 1
        if self._came == 1:
            interrupts.say(f"cupynet: {signal.Signals(number).name}: {self._said}; again: at once\n")

    def hand_on(self, tell: Iterable[Callable[[int], object]]) -> None:
        """Those that came since the last time. tell: sends one of these processes a signal."""
        told = list(tell)
        while self._handed_on < self._came:
            self._handed_on += 1
            for each in told:
                with contextlib.suppress(ProcessLookupError):
                    each(signal.SIGKILL if self._handed_on >= IMPATIENT else self.first)
