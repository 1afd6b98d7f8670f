"""Event files for TensorBoard, written by tensorboardX, without TensorFlow.

tensorboardX's `SummaryWriter` writes in a thread: after its failure, on a full disk, the eleventh event blocks forever.
`EventsWriter` raises errors.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from cupynet.training.callbacks.loggers.base import Beginning, Logger

log = logging.getLogger(__name__)


class TensorBoard(Logger):
    """Scalars and hyperparameters for TensorBoard: `tensorboard --logdir outputs` shows all runs.

    A resumed run continues in the same folder; TensorBoard ignores events after the checkpoint.

    Args:
        path: the folder of event files; by default `tensorboard` in the run's folder, or in the current one.
    """

    package, extra = "tensorboardX", "tensorboard"

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self._given = None if path is None else Path(path)
        self.path: Path | None = None
        self._file: Any = None
        self._ended: Any = None

    def _begin(self, beginning: Beginning) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import hparams

        self.path = self._given or (beginning.folder or Path()) / "tensorboard"
        self.path.mkdir(parents=True, exist_ok=True)
        number = len(list(self.path.iterdir()))  # names have seconds: two files may begin within one
        self._file = EventsWriter(os.fspath(self.path / "events"), f".{os.getpid()}.{number}")
        if beginning.iteration:
            self._event(beginning.iteration + 1, session_log=SessionLog(status=SessionLog.START))
        experiment, started, self._ended = hparams(beginning.hyperparameters, {"result/test_accuracy": 0.0})
        self._event(beginning.iteration, summary=experiment)
        self._event(beginning.iteration, summary=started)
        self._file.flush()
        self._last = beginning.iteration

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

    def _abandon(self) -> None:
        if self._file is not None:
            self._file._py_recordio_writer.close()  # its own `close` writes first

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))
