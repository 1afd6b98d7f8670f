"""The time that a worker waits for the others is part of its averaging time, wherever it waits."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.typing import NDArray

from cupynet.data import Loader
from cupynet.optim import SGD
from cupynet.parallel import ParameterAveraging, SerialCommunicator
from cupynet.training import Replica
from cupynet.training.fit import Fit
from tests.support.trainers import trainer_of
from tests.support.training import small_dataset, small_model


class Late(SerialCommunicator):
    """The others come a second late to an exchange, and ten seconds late to a barrier."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now = now

    def gather_numbers(self, *numbers: float) -> NDArray[Any]:
        self.now[0] += 1.0
        return super().gather_numbers(*numbers)

    def barrier(self) -> None:
        self.now[0] += 10.0
        super().barrier()


def averaging_s(report_every: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Train for three rounds of one epoch."""
    now = [0.0]
    monkeypatch.setattr("cupynet.training.clock.time.perf_counter", lambda: now[0])
    replica = Replica(small_model(), SGD(0.01))
    trainer = trainer_of(Late(now), replica, ParameterAveraging("end"), report_every=report_every)
    trainer.fit(Fit(Loader(small_dataset(12), 4), 1))
    return trainer.statistics.clock.averaging_s


def test_waiting_at_reports_and_at_the_end_of_an_epoch_counts_as_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    without = averaging_s(0, monkeypatch)
    assert without > 10
    assert averaging_s(1, monkeypatch) == without + 3
