"""A callback: prints the training loss."""

from cupynet import Callback


class PrintScore(Callback):
    """Prints the training loss every `log_every` iterations."""

    def on_log(self, trainer, record):
        print(f"iteration {record.iteration}: loss {record.loss:.4f}")
