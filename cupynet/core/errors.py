"""Errors raised deliberately by cupynet, with the exit codes of commands.

CupynetError                1   base class
├── ConfigError             2   invalid setting, argument or shape (also a ValueError)
├── ClosedError             1   workers used after they were closed or failed (also a RuntimeError)
├── DivergedError           3   training produced a non-finite number
├── DeviceError             1   GPU failure, or out of GPU memory
├── DataError              65   missing, damaged or unsuitable data file
├── OutputError            74   a result cannot be written
└── Interrupted       130/143   stopped by a signal

After most other errors, commands print a traceback and exit with 1. Running out of memory (exit code 1) and a full or
unwritable disk (74) are reported on one line. A SystemExit raised during a job keeps a nonzero integer code.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Container, Iterator
from contextlib import contextmanager

from cupynet.core.terminal import printable
from cupynet.core.wording import one_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # errors of a full or unwritable disk


class CupynetError(Exception):
    """Base class of cupynet's errors. The message is one line: what is wrong, where, and what to do.

    Control characters are replaced, because the message may quote a file or its name.
    """

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class ConfigError(CupynetError, ValueError):
    """Invalid setting, argument or shape. Raised before any work starts. Constructors raise it for invalid arguments.

    The message is `setting=value: reason`, `setting: reason`, or only the reason.

    Args:
        reason: what is wrong, and what to do.
        setting: a dotted key, or an argument, optionally preceded by its class (`Conv2D filters`).
        value: the rejected value as text; None to omit it.

    Attributes:
        owner: class of the argument, or "".
        setting: the argument or key without the class; "" if the error concerns several settings.
    """

    exit_code = 2

    def __init__(self, reason: str = "", setting: str = "", value: str | None = None) -> None:
        self.owner, _, self.setting = setting.rpartition(" ")
        self.value, self.reason = value, reason
        prefix = setting if value is None else f"{setting}={value}"
        super().__init__(f"{prefix}: {reason}" if prefix else reason)


@contextmanager
def errors_of(key: str, arguments: Container[str] | None = None) -> Iterator[None]:
    """Context manager that prefixes the setting of a ConfigError: `stages` becomes `pipeline.stages`.

    Args:
        key: the prefix, such as `pipeline`.
        arguments: the settings to prefix, by default all. Any other error is attributed to `key` itself, with the whole
            message as the reason.
    """
    try:
        yield
    except ConfigError as error:
        name = error.setting.partition(".")[0]
        if name and (arguments is None or name in arguments):
            raise ConfigError(error.reason, f"{key}.{error.setting}", error.value) from error
        raise ConfigError(str(error), key) from error


class ClosedError(CupynetError, RuntimeError):
    """A `ParallelWrapper` was used after it was closed or aborted (by a second Ctrl-C), or after a worker failed."""


class DivergedError(CupynetError):
    """A loss, gradient or weight is not finite. Raised before the value is averaged into other replicas."""

    exit_code = 3


class DeviceError(CupynetError):
    """A GPU is out of memory or has failed. The message names the device, the worker, the batch size and a remedy."""


class DataError(CupynetError):
    """A data file is missing, damaged or unsuitable. The message says what was expected and found."""

    exit_code = 65


class OutputError(CupynetError):
    """A result cannot be written. Files written earlier stay intact."""

    exit_code = 74


class Interrupted(CupynetError):
    """A signal stopped the command. Exit code 130 for SIGINT; 143 for SIGTERM, SIGUSR1 and SIGHUP.

    saved: what was saved, if that is known.
    """

    def __init__(self, signal_number: int, saved: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}{saved and f': {saved}'}")
        self.signal_number = signal_number
        self.exit_code = 130 if signal_number == signal.SIGINT else 143

    @classmethod
    def by(cls, stopped: KeyboardInterrupt, saved: str = "") -> Interrupted:
        """Convert a KeyboardInterrupt. If no signal handler raised it, it counts as SIGINT."""
        return cls(signal_of(stopped) or signal.SIGINT, saved)


def signal_of(error: BaseException) -> int:
    """Return the signal whose handler raised `error`, or 0 if other code raised it, such as a callback."""
    if not isinstance(error, KeyboardInterrupt):
        return 0
    if error.args:  # from a handler of cupynet.core.signals
        return error.args[0] if isinstance(error.args[0], int) else 0
    return signal.SIGINT if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 0


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its causes and contexts, outermost first. Ends even if the chain is a cycle."""
    visited: list[BaseException] = []
    while error is not None and not any(error is earlier for earlier in visited):  # OmegaConf's chains can be cyclic
        visited.append(error)
        yield error
        error = error.__cause__ or error.__context__


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted.by(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1  # never 0: the work is incomplete
    if isinstance(error, OSError) and error.errno in FULL:
        return OutputError.exit_code
    return error.exit_code if isinstance(error, CupynetError) else 1


def described(error: BaseException) -> str:
    """Format an error on one line, with its class unless it is a CupynetError or was caused by a signal."""
    if isinstance(error, KeyboardInterrupt) and signal_of(error):
        error = Interrupted.by(error)
    text = one_line(error)
    return text if isinstance(error, CupynetError) else f"{type(error).__name__}: {text}"


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an error, printed after its traceback. Python 3.10 stores the note but does not print it."""
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]  # as add_note does in Python 3.11
