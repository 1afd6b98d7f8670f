"""Evaluate a finished run again: `python -m cupynet.evaluate RUN_FOLDER [key=value ...]`.

With the run's own settings, workers and backend the figures are those of its summary.json, to the last digit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cupynet import config
from cupynet.errors import ConfigError, DataError
from cupynet.exits import tell


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m cupynet.evaluate",
        description="Evaluate the weights of a finished run on its test set.",
        epilog="overrides are settings of the run, changed: workers=1 data=synthetic",
    )
    parser.add_argument("run_folder", type=Path, help="a folder that cupynet.train has written")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    arguments = parser.parse_args()
    try:
        evaluate(arguments.run_folder, arguments.overrides)
    except BaseException as error:
        raise SystemExit(tell(error)) from None


def evaluate(folder: Path, overrides: list[str]) -> None:
    """Print the evaluation of the run in `folder`."""
    from cupynet.experiment import Experiment
    from cupynet.files import load_weights

    summary = read_summary(folder)
    pinned = [f"{key}={summary[key]}" for key in ("workers",) if summary.get(key) is not None]
    settings = config.load(folder, [*pinned, *overrides])
    experiment = Experiment(settings)
    weights = load_weights(folder / "weights.safetensors")
    data = experiment.source.load()
    if not any(override.startswith(("data=", "data.")) for override in overrides):
        check_same_data(data.name, summary)

    def task(communicator: Any) -> Any:
        trainer = experiment.trainer(communicator)
        trainer.model.load_weights(weights)
        return trainer.evaluate(experiment.evaluation_loader(data.test))

    with experiment.team() as team:
        evaluation = team.run(task)[0]
    print(evaluation.stats())
    print(f"test accuracy {evaluation.accuracy:.4f}, loss {evaluation.loss!r}")
    if "test_accuracy" in summary and not overrides:
        same = (evaluation.accuracy, evaluation.loss) == (summary["test_accuracy"], summary["test_loss"])
        print("the same as in summary.json" if same else f"summary.json says {summary['test_accuracy']}")


def check_same_data(name: str, summary: dict[str, Any]) -> None:
    """Refuse other images than the run's: MNIST was missing then and is there now, or the other way round."""
    before = summary.get("dataset", name)
    if name != before:
        raise DataError(
            f"the run was made on {before}, and now {name} was found: bring {before} back, or choose with data=..."
        )


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a run folder. ConfigError where that is no run folder, DataError where the file is damaged."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a finished run, it has no summary.json: name a folder under outputs/")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path}: is not a summary, expected an object, found {type(summary).__name__}")
    return summary


if __name__ == "__main__":
    main()
