"""A command of this package in a process of its own, which asks whoever started it what to do.

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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cupynet.resume import PART

if TYPE_CHECKING:
    from cupynet.sweeps.shares import Share

ASKS = "CUPYNET_ASKS"  # in a job's environment: its ends of the two pipes, for reading and for writing
OWN = "cupynet: "  # how a command's errors begin, each a line


class Job:
    """A command of this package that is running.

    It is in a session of its own: Ctrl-C on the terminal reaches who started it, who may hand it on (`tell`).

    Args:
        module: as `python -m` takes it.
        arguments: of the command.
        share: of the machine, that is its own.
    """

    def __init__(self, module: str, arguments: Sequence[str], share: Share) -> None:
        answers, asks = os.pipe(), os.pipe()
        theirs = answers[0], asks[1]
        environment = {**os.environ, **share.environment(), ASKS: ",".join(map(str, theirs)), PART: "search"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the job
        try:
            with share.held():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=environment,
                    pass_fds=theirs,
                    start_new_session=True,
                )
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
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait until it has ended: its exit code, that of shells after a signal; what it said of its error, or ""."""
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()
        self.close()
        reason = next((line.removeprefix(OWN) for line in reversed(said) if line.startswith(OWN)), "")
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as the system does where no memory is left" * (-code == signal.SIGKILL)
            return 128 - code, f"ended by {name}{memory}"
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
