"""Log handlers and formatters for the terminal and for log files."""

from __future__ import annotations

import logging

from cupynet.core.terminal import UNWRITABLE, printable, say_error

WARNING = "warning: "  # prefix of warnings on the terminal


class Console(logging.Handler):
    """Prints log records to stdout as `[12:30:05] text`, and errors to stderr as `cupynet: text`."""

    label = ""  # prefix of warnings, such as a job number

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(record.getMessage().strip())
        try:
            if record.levelno >= logging.ERROR:
                say_error(text, record.exc_info[1] if record.exc_info else None)
            else:
                mark = f"{WARNING}{self.label}" if record.levelno >= logging.WARNING else ""
                print(f"[{_CLOCK.formatTime(record, '%H:%M:%S')}] {mark}{text}", flush=True)
        except UNWRITABLE:
            pass  # the run continues, and the record is in the log file


def quiet() -> None:
    """Show only warnings and errors on the terminal. Log files are not affected."""
    for name in ("cupynet", "__main__"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, Console):
                handler.setLevel(logging.WARNING)


class LineFormatter(logging.Formatter):
    """Replaces control characters, because text from files must not control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


_CLOCK = logging.Formatter()
