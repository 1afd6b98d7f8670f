"""Trials that only say what a script tells them to: no process, and no training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


class Scripted:
    """A trial at work, as `cupynet.sweeps.jobs.Job` is one, that has said all it will ever say.

    Args:
        said: after each epoch, or at its end.
        code, reason: that it ends with.
        before: is called when it is first listened to.
    """

    def __init__(
        self, said: list[dict[str, Any]], code: int = 0, reason: str = "", before: Callable[[], None] | None = None
    ) -> None:
        self._read, write = os.pipe()
        os.write(write, b"".join(json.dumps(each).encode() + b"\n" for each in said) or b"\n")
        os.close(write)
        self._end, self._before = (code, reason), before
        self.answers: list[str] = []
        self.signals: list[int] = []
        self.open = True

    def fileno(self) -> int:
        return self._read

    def asked(self) -> list[dict[str, Any]] | None:
        if self._before is not None:
            self._before()
        read = os.read(self._read, 1 << 16)
        return [json.loads(line) for line in read.split(b"\n") if line] if read else None

    def answer(self, text: str) -> None:
        self.answers.append(text)

    def tell(self, number: int) -> None:
        self.signals.append(number)

    def end(self) -> tuple[int, str]:
        self.close()
        return self._end

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self._read)


def epoch(number: int, accuracy: float, *, last: bool = False) -> dict[str, Any]:
    return {"epoch": number, "last": last, "figures": figures(accuracy)}


def result(number: int, accuracy: float) -> dict[str, Any]:
    return {"epoch": number, "result": figures(accuracy)}


def figures(accuracy: float) -> dict[str, float]:
    return {"accuracy": accuracy, "loss": 1 - accuracy, "f1": accuracy}
