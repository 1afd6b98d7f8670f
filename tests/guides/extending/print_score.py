"""A callback: prints the training loss."""

from cupynet import Callback


class PrintScore(Callback):
    """Prints worker 0's mean training loss of the last `log_every` iterations."""

    def on_log(self, trainer, record):
        print(f"iteration {record.iteration}: loss {record.loss:.4f}")
