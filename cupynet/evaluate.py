"""Evaluate a finished run again: `python -m cupynet.evaluate RUN_FOLDER [key=value ...]`.

With the run's own settings, workers and backend the figures are those of its summary.json, to the last digit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet import config
from cupynet.errors import ConfigError, DataError
from cupynet.exits import steady_streams, tell
from cupynet.mpiexec import started
from cupynet.settings import Settings

if TYPE_CHECKING:
    from cupynet.runs import Summary


def main() -> None:
    """The command."""
    steady_streams()
    parser = argparse.ArgumentParser(
        prog="python -m cupynet.evaluate",
        description="Evaluate the weights of a finished run on its test set.",
        epilog="overrides are settings of the run, changed: workers=1 data=synthetic",
    )
    parser.add_argument("run_folder", type=Path, help="a folder that cupynet.train has written")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    try:
        if started() is not None:
            raise ConfigError("evaluate works in one process, in threads: start it without mpiexec")
        arguments = parser.parse_args()
        evaluate(arguments.run_folder, arguments.overrides)
    except BaseException as error:
        if (started() or (0, 0))[0]:
            raise SystemExit(getattr(error, "exit_code", 1)) from None  # rank 0 tells it
        raise SystemExit(tell(error)) from None


def evaluate(folder: Path, overrides: list[str]) -> None:
    """Print the evaluation of the run in `folder`."""
    from cupynet.experiment import Experiment
    from cupynet.runs import Run

    run = Run(folder)
    summary = run.summary()
    settings = without_training(config.load(folder, [f"workers={summary.workers}", *overrides]))
    changed = [override.lstrip("+~").partition("=")[0].split(".") for override in overrides]
    if not any(keys == ["data"] or keys[0] == "data" and keys[1] in ("_target_", "normalize") for keys in changed):
        settings = normalized_as(settings, summary)
    experiment = Experiment(settings)
    weights, data = run.weights(), experiment.load()
    if not any(override.startswith(("data=", "data.")) for override in overrides):
        check_same_data(data.name, summary)
    with experiment.wrapper(callbacks=()) as wrapper:
        wrapper.model.load_weights(weights)
        evaluation = wrapper.evaluate(experiment.evaluation_loader(data.test))
    print(evaluation.stats())
    print(f"test accuracy {evaluation.accuracy:.4f}, loss {evaluation.loss!r}")
    if all(override.startswith("trusted_modules=") for override in overrides):
        same = (evaluation.accuracy, evaluation.loss) == (summary.test_accuracy, summary.test_loss)
        print("the same as in summary.json" if same else f"summary.json says {summary.test_accuracy}")


def without_training(settings: Settings) -> Settings:
    """The settings with plain stand-ins for the parts that only training needs: those may be a user's own."""
    idle = {"_target_": "cupynet.optim.SGD", "learning_rate": 1.0}
    averaging = replace(
        settings.parallel, launcher="thread", synchronizer={"_target_": "cupynet.parallel.ParameterAveraging"}
    )
    data = {name: [] if name == "augment" else value for name, value in settings.data.items()}
    return replace(settings, callbacks={}, optimizer=idle, parallel=averaging, data=data)


def normalized_as(settings: Settings, summary: Summary) -> Settings:
    """The settings with the run's own mean and deviation, whatever these training images would give now."""
    if summary.normalize is None or settings.data.get("storage") == "sharded":  # shards have their own
        return settings
    return replace(settings, data={**settings.data, "normalize": summary.normalize})


def check_same_data(name: str, summary: Summary) -> None:
    """Refuse other images than the run's: MNIST was missing then and is there now, or the other way round."""
    before = summary.dataset
    if name != before:
        raise DataError(
            f"the run was made on {before}, and now {name} was found: bring {before} back, or choose with data=..."
        )


if __name__ == "__main__":
    main()
