"""TensorBoard event files, without TensorFlow.

`EventsWriter` raises errors, whereas `SummaryWriter` blocks forever if its thread fails, for example on a full disk.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from cupynet.training.callbacks.loggers.base import Logger


class TensorBoard(Logger):
    """Logs scalars and hyperparameters for TensorBoard. To view all runs: `tensorboard --logdir outputs`.

    A resumed run continues in the same folder. TensorBoard ignores the events that the earlier run wrote after the
    checkpoint.

    Args:
        path: the folder for event files; by default `tensorboard` in the run folder or, without a run, in the current
            folder.
    """

    package, extra = "tensorboardX", "tensorboard"

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)

    def _begin(self, hyperparameters: dict[str, Any], iteration: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import hparams

        folder = self.path or (self.folder or Path()) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))  # file names have a time resolution of one second
        self._file = EventsWriter(os.fspath(folder / "events"), f".{os.getpid()}.{number}")
        if iteration:
            self._event(iteration + 1, session_log=SessionLog(status=SessionLog.START))
        experiment, started, self._ended = hparams(hyperparameters, {"result/test_accuracy": 0.0})
        self._event(iteration, summary=experiment)
        self._event(iteration, summary=started)
        self._file.flush()
        self._last = iteration

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._event(iteration, summary=Summary(value=values))
        self._file.flush()
        self._last = iteration

    def _end(self, status: str, results: dict[str, float]) -> None:
        self._write(self._last, results)
        if status == "finished":
            self._event(self._last, summary=self._ended)
        self._file.close()
        del self._file  # cannot be pickled

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))
