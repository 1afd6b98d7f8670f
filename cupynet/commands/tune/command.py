"""Search for good settings: `cupynet tune optimizer.learning_rate='interval(0.001,0.3)' [key=value ...]`.

Trials are trained one after the other, in this process, and compared by images held out of training. The test images
are used once, by the best trial.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from cupynet import config
from cupynet.commands.tune.arguments import Plan, for_hydra, prepare
from cupynet.config.schema import TuneSettings
from cupynet.core import signals
from cupynet.core.errors import CupynetError
from cupynet.core.exits import steady_streams, tell


def main() -> None:
    """Run the command."""
    signals.command(_command)


def _command() -> None:
    typed = sys.argv[1:]
    try:
        sys.argv[1:], resumed = for_hydra(typed)
    except CupynetError as error:
        steady_streams()
        raise SystemExit(tell(error)) from None
    config.run(_search, partial(prepare, sys.argv[1:], resumed, typed), "tune", TuneSettings)


def _search(plan: Plan, folder: Path) -> float:
    from cupynet.commands.tune.search import search  # needs Optuna: `prepare` has checked that it is installed

    return search(plan, folder)
