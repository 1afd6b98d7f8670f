"""A trial of a search: a run like any other, in a process of its own, which asks after each epoch whether to go on.

It is begun by `cupynet.tune`. Its folder is a run's folder. The test images are not looked at: a search chooses by the
validation images, and only what it has chosen is tested, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynet import interrupts
from cupynet.settings import Settings
from cupynet.sweeps import jobs

if TYPE_CHECKING:
    from cupynet.experiment import Experiment

asking = jobs.Asking()


def main() -> None:
    """The command."""
    interrupts.command(_command)


def _command() -> None:
    from cupynet import config
    from cupynet.train import train

    config.run(train, prepare, "config", Settings)


def prepare(settings: Settings) -> Experiment:
    """The experiment of one trial."""
    from cupynet.train import prepare
    from cupynet.tune.judged import Judged

    experiment = prepare(settings)
    experiment.tests = False
    experiment.callbacks.append(Judged(asking))
    return experiment


if __name__ == "__main__":
    main()
