"""A search: trials are chosen, begun, asked how they come on, pruned, and written down, some of them side by side."""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cupynet import interrupts
from cupynet.errors import ConfigError, DataError, DivergedError, OutputError
from cupynet.sweeps.jobs import HandedOn
from cupynet.tune import tried as known
from cupynet.tune.judged import GO_ON, PRUNED
from cupynet.tune.tried import Tried

if TYPE_CHECKING:
    from cupynet.sweeps.shares import Share
    from cupynet.tune.study import Study

log = logging.getLogger(__name__)

POLL_S = 0.2
SIGNALLED = (130, 143)  # exit codes of a run that a signal ended
NOT_ITS_FAULT = (DataError.exit_code, OutputError.exit_code)  # no other settings would do better


class Running(Protocol):
    """A trial at work, see `jobs.Job`."""

    def fileno(self) -> int: ...

    def asked(self) -> list[dict[str, Any]] | None: ...

    def answer(self, text: str) -> None: ...

    def tell(self, number: int) -> None: ...

    def end(self) -> tuple[int, str]: ...

    def close(self) -> None: ...


@dataclass
class _Trial:
    """One that is going on."""

    tried: Tried
    job: Running
    share: Share
    began: float = field(default_factory=time.monotonic)
    epochs: int = 0
    figure: float | None = None
    result: float | None = None
    pruned: bool = False


class Search:
    """Goes through trials until there are enough.

    Args:
        study: what is known.
        begin: starts a trial in a share of the machine.
        shares: as many as trials are to be side by side.
        trials: how many are to count, in all.
        timeout_s: after which none begins; None for no limit.
        say: is told of each trial that has ended.
    """

    def __init__(
        self,
        study: Study,
        begin: Callable[[Tried, Share], Running],
        shares: Sequence[Share],
        trials: int,
        timeout_s: float | None,
        say: Callable[[Tried], None],
    ) -> None:
        self._study, self._begin, self._free, self._say = study, begin, list(shares), say
        self._most, self._deadline = trials, None if timeout_s is None else time.monotonic() + timeout_s
        self._running: list[_Trial] = []
        self._signals = HandedOn("the trials at work stop, no more begin")
        self.late = False
        self._failure: tuple[int, str] | None = None

    @property
    def signal(self) -> int:
        """That told it to end; 0 while none has."""
        return self._signals.first

    def run(self) -> None:
        """All trials. DataError, OutputError: one of them met what no settings can change."""
        with interrupts.handled(self._signals), selectors.DefaultSelector() as selector:
            try:
                while self._running or self._more():
                    while self._free and self._more():
                        self._start(selector)
                    for key, _ in selector.select(POLL_S):
                        self._hear(key.data, selector)
                    self._signals.hand_on(each.job.tell for each in self._running)
            finally:
                for each in self._running:  # only where something failed here
                    each.job.close()
        if self._failure is not None:
            code, reason = self._failure
            raise (DataError if code == DataError.exit_code else OutputError)(reason)

    def _more(self) -> bool:
        """Whether another trial is to begin."""
        if self.signal or self._failure is not None:
            return False
        if self._study.counted + len(self._running) >= self._most or self._study.exhausted:
            return False
        self.late = self._deadline is not None and time.monotonic() >= self._deadline
        return not self.late

    def _start(self, selector: selectors.BaseSelector) -> None:
        tried = self._study.ask()
        twin = self._study.twin(tried)
        if twin is not None:
            reason = f"as trial {twin.number}"
            self._study.tell(tried.number, known.REPEATED, figure=twin.figure, epochs=0, wall_s=0.0, reason=reason)
            self._say(self._study.tried()[tried.number])
            return
        share = self._free[0]
        try:
            job = self._begin(tried, share)
        except OSError as error:  # no room for one more process now: those at work come to their end
            reason = f"cannot be started ({error.strerror})"
            self._study.tell(tried.number, known.INTERRUPTED, figure=None, epochs=0, wall_s=0.0, reason=reason)
            self._failure = OutputError.exit_code, f"trial {tried.number}: {reason}"
            return
        trial = _Trial(tried, job, self._free.pop(0))
        self._running.append(trial)
        selector.register(trial.job, selectors.EVENT_READ, trial)

    def _hear(self, trial: _Trial, selector: selectors.BaseSelector) -> None:
        """Questions of a trial, or its end."""
        questions = trial.job.asked()
        if questions is None:
            selector.unregister(trial.job)
            self._end(trial)
            return
        for question in questions:
            trial.epochs = int(question["epoch"])
            if "result" in question:
                trial.result = float(question["result"][self._study.objective])
                trial.job.answer(GO_ON)
                continue
            figures, last = question["figures"], bool(question["last"])
            trial.figure = float(figures[self._study.objective])
            goes_on = self._study.report(trial.tried.number, trial.epochs, figures, last=last)
            trial.pruned = trial.pruned or not goes_on
            trial.job.answer(GO_ON if goes_on else PRUNED)

    def _end(self, trial: _Trial) -> None:
        code, reason = trial.job.end()
        self._running.remove(trial)
        self._free.append(trial.share)
        outcome, reason = _outcome(trial, code, reason, told=bool(self.signal))
        if code in NOT_ITS_FAULT:
            self._failure, outcome = (code, f"trial {trial.tried.number}: {reason}"), known.INTERRUPTED
        figure = trial.result if outcome == known.COMPLETE else trial.figure
        number, seconds = trial.tried.number, time.monotonic() - trial.began
        self._study.tell(number, outcome, figure=figure, epochs=trial.epochs, wall_s=seconds, reason=reason)
        self._say(self._study.tried()[number])


def _outcome(trial: _Trial, code: int, reason: str, *, told: bool) -> tuple[str, str]:
    """What has become of a trial whose process has ended. told: the search itself was told to end."""
    if code == 0 and trial.pruned:
        return known.PRUNED, f"after {trial.epochs} epoch{'s' * (trial.epochs != 1)}"
    if code == 0 and trial.result is not None:
        if trial.result == trial.result:
            return known.COMPLETE, ""
        return known.DIVERGED, "its last evaluation is not a number"
    if code in SIGNALLED or (told and code > 128):
        return known.INTERRUPTED, reason or f"exit code {code}"
    if code == DivergedError.exit_code:
        return known.DIVERGED, reason
    if code == 128 + signal.SIGKILL or "memory" in reason.lower():
        return known.NO_MEMORY, reason
    if code == 0:
        return known.FAILED, "nothing was evaluated at its end"
    refused = "refused: " * (code == ConfigError.exit_code)
    return known.FAILED, f"{refused}{reason}" or f"exit code {code}"


def folder_of(study: Path, number: int) -> Path:
    """Where the run of a trial is."""
    return study / "trials" / f"{number:04d}"
