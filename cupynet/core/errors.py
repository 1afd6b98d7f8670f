"""Errors that cupynet raises on purpose, each with the exit code of a command that ends with it.

CupynetError                1   base class of all of them
├── ConfigError             2   a setting, an argument or a shape that cannot work (also a ValueError)
├── DivergedError           3   training produced a number that is not finite
├── DeviceError             1   a GPU that has no memory left, or has failed
├── DataError              65   a data file is missing, damaged or of another kind
├── OutputError            74   a result that could not be written
└── Interrupted       130/143   a signal asked the run to stop

Any other error ends a command with 1 and a traceback; if memory runs out, with 1 and one line.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

from cupynet.core.terminal import printable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # a disk that cannot be written


class CupynetError(Exception):
    """Base class of cupynet's errors. The text is one line: what is wrong, where, and what to do.

    It may quote a file or its name, so control characters in it are replaced.
    """

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class ConfigError(CupynetError, ValueError):
    """A setting, an argument or a shape is invalid. Raised before any work is done.

    The message is `setting=value: reason`, `setting: reason`, or the reason alone.

    Args:
        reason: what is wrong, and what to do.
        setting: a dotted key, or an argument, with its class in front if it has one (`Conv2D filters`).
        value: the refused value as text; None to omit it.

    Attributes:
        owner: the class of the argument; "" if there is none.
        setting: the argument or key without its class; "" if the error is not about a single one.
        value, reason: the arguments.
    """

    exit_code = 2

    def __init__(self, reason: str = "", setting: str = "", value: str | None = None) -> None:
        self.owner, _, self.setting = setting.rpartition(" ")
        self.value, self.reason = value, reason
        about = setting if value is None else f"{setting}={value}"
        super().__init__(f"{about}: {reason}" if about else reason)


class DivergedError(CupynetError):
    """A loss, a gradient or a weight is not finite. Raised before it is averaged into another replica."""

    exit_code = 3


class DeviceError(CupynetError):
    """A GPU has no memory left, or has failed: says which, with which worker and batch size, and what to do."""


class DataError(CupynetError):
    """A data file is missing, damaged or of another kind. The text says what was expected and found."""

    exit_code = 65


class OutputError(CupynetError):
    """A result could not be written; what was written before stays intact."""

    exit_code = 74


class Interrupted(CupynetError):
    """A signal asked the run to stop: exit code 130 for SIGINT; 143 for SIGTERM, SIGUSR1 and SIGHUP."""

    def __init__(self, signal_number: int, saved: str = "nothing of this run was saved") -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}: {saved}")
        self.signal_number = signal_number
        self.exit_code = 130 if signal_number == signal.SIGINT else 143

    @classmethod
    def by(cls, stopped: KeyboardInterrupt, saved: str = "nothing of this run was saved") -> Interrupted:
        """Convert a KeyboardInterrupt; one that no signal handler raised counts as SIGINT."""
        return cls(signal_of(stopped) or signal.SIGINT, saved)


def signal_of(error: BaseException) -> int:
    """Return the signal whose handler raised `error`, or 0 if it was raised by other code, such as a callback.

    Handlers of cupynet.core.signals pass the signal number as argument; Python's SIGINT handler passes none.
    """
    if not isinstance(error, KeyboardInterrupt):
        return 0
    if error.args:
        return error.args[0] if isinstance(error.args[0], int) else 0
    return signal.SIGINT if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 0


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its causes and contexts, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command whose work ends with `error`."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted.by(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1  # 0 too: the work is not done
    if isinstance(error, OSError) and error.errno in FULL:
        return OutputError.exit_code
    return error.exit_code if isinstance(error, CupynetError) else 1


def described(error: BaseException) -> str:
    """Return the message of an error in one line, with the name of its class in front unless it is a CupynetError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CupynetError) else f"{type(error).__name__}: {text}"


def annotate(error: BaseException, note: str) -> None:
    """Add a line to an error's traceback: where it happened. Python 3.10 keeps the note but does not print it."""
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]  # what add_note does from Python 3.11 on
