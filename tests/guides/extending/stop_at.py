"""A callback: ends training once the loss is low enough."""

from cupynet import Callback


class StopAt(Callback):
    """Stops all workers when the mean loss between two reports has come down to `loss`."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_log(self, trainer, report):
        if report.loss <= self.loss:
            trainer.stop(f"the loss has come down to {report.loss:.3f}")
