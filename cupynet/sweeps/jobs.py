"""Processes that work for this one: how they begin and end, and hear of signals; and one that asks what to do.

It asks over a pair of pipes, a line each way. When one of the two processes is no more, the other's pipe says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cupynet import interrupts

if TYPE_CHECKING:
    from cupynet.sweeps.shares import Share

ASKS = "CUPYNET_ASKS"  # in a job's environment: its ends of the two pipes, for reading and for writing
OWN = "cupynet: "  # how a command's errors begin, each a line
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


class Job:
    """A command of this package that is running, and asks.

    Args:
        module: as `python -m` takes it.
        arguments: of the command.
        share: of the machine, that is its own.
    """

    def __init__(self, module: str, arguments: Sequence[str], share: Share) -> None:
        answers, asks = os.pipe(), os.pipe()
        theirs = answers[0], asks[1]
        environment = {**share.environment(), ASKS: ",".join(map(str, theirs))}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the job
        try:
            words = [sys.executable, "-m", module, *arguments]
            how = {"stdout": subprocess.DEVNULL, "stderr": self._errors, "pass_fds": theirs}
            self._process = begun(words, share, environment, **how)
        except BaseException:
            os.close(answers[1])
            os.close(asks[0])
            self._errors.close()
            raise
        finally:
            for each in theirs:
                os.close(each)
        self._answers, self._asks, self._unread = answers[1], asks[0], b""

    def fileno(self) -> int:
        """Where it asks: ready to be read when there is something, and when it has ended."""
        return self._asks

    def asked(self) -> list[dict[str, Any]] | None:
        """What it has asked since, waiting for something; None when it has no more to say."""
        read = os.read(self._asks, 1 << 16)
        *lines, self._unread = (self._unread + read).split(b"\n")
        return [json.loads(line) for line in lines] if read else None

    def answer(self, text: str) -> None:
        """One line, to what was asked; nothing where it has ended meanwhile."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answers, f"{text}\n".encode())

    def tell(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait until it has ended: its exit code, that of shells after a signal; what it said of its error, or ""."""
        self._process.wait()
        code, ended_by = came_to(self._process)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()
        self.close()
        if ended_by:
            return code, ended_by + ", as the system does where no memory is left" * (code == 128 + signal.SIGKILL)
        reason = next((line.removeprefix(OWN) for line in reversed(said) if line.startswith(OWN)), "")
        return code, reason or (said[-1] if said and code else "")

    def close(self) -> None:
        """Let go of it; one that still runs is killed. Harmless a second time."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if not self._errors.closed:
            self._errors.close()
            os.close(self._answers)
            os.close(self._asks)


class Asking:
    """In a job: the way to who started it. Nobody is there where the command was not started as a job."""

    def __init__(self) -> None:
        pipes = os.environ.pop(ASKS, "")
        self._pipes = tuple(int(each) for each in pipes.split(",")) if pipes else None
        for each in self._pipes or ():
            os.set_inheritable(each, False)

    def ask(self, question: dict[str, Any]) -> str:
        """The answer, one word; "" where nobody is there any more."""
        if self._pipes is None:
            return ""
        read, write = self._pipes
        try:
            os.write(write, json.dumps(question).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                more = os.read(read, 64)
                if not more:
                    return ""
                answer += more
        except OSError:
            return ""
        return answer.decode().strip()
