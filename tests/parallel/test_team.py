"""What ranks know of each other, without MPI."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np

from cupynet.parallel.team import Outbox


def test_an_outbox_that_closes_while_its_thread_goes_to_sleep_wakes_it() -> None:
    class Clearing(threading.Event):
        def clear(self) -> None:
            closing.start()
            closing.join(0.2)  # as far as it comes meanwhile
            super().clear()
            cleared.set()

    cleared = threading.Event()
    outbox = Outbox(SimpleNamespace(Request=SimpleNamespace(Testall=lambda requests: sent.is_set())))
    closing, sent, outbox._work = threading.Thread(target=outbox.close, daemon=True), threading.Event(), Clearing()
    outbox.send([], outbox.copy(np.zeros(3)))
    sent.set()
    assert cleared.wait(10)
    closing.join(3)
    assert not closing.is_alive() and not outbox._thread.is_alive()
