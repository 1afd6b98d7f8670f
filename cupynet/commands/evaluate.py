"""Evaluate a finished run: `cupynet evaluate RUN [key=value ...]`.

With the run's settings, workers and backend, the results match its summary.json exactly. Without a test set, the
validation images are evaluated; without either, the training images.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynet.commands.arguments import Arguments
from cupynet.config.overrides import name_of
from cupynet.config.schema import Settings
from cupynet.core.checks import finite
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.exits import run_and_exit
from cupynet.core.wording import counted, shown

if TYPE_CHECKING:
    from cupynet.config.load_model import LoadedRun
    from cupynet.training import Evaluation

EXAMPLES = """examples:
  cupynet evaluate outputs/latest
  cupynet evaluate outputs/latest workers=1 data=fashion_mnist
  cupynet evaluate outputs/latest data=folder data.folder=new    # new/<class>/*.png, or new/test/<class>/*.png
  cupynet evaluate outputs/latest/checkpoints/step-00001234 --json"""

log = logging.getLogger(__name__)

SMOKE_TEST = re.compile(r", \S+ batch(es)?: a fast dev run$")  # end of the data set's name, from earlier versions


def main() -> None:
    parser = Arguments("cupynet evaluate", "Evaluate the weights of a finished run on its test set.", EXAMPLES)
    parser.add_run()
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings to change")
    parser.add_argument("--json", action="store_true", help="print JSON")
    run_and_exit(lambda: evaluate(parser.parse_intermixed_args()))


class Evaluated(NamedTuple):
    """An evaluation of a run, with the name, split and classes of the data."""

    evaluation: Evaluation
    dataset: str
    split: str
    class_names: tuple[str, ...]
    trained: LoadedRun


def evaluate(arguments: argparse.Namespace) -> None:
    path, overrides = arguments.run, arguments.overrides
    evaluation, dataset, split, names, trained = evaluated(path, overrides)
    if arguments.json:
        print(
            json.dumps(
                {"run": str(path), "dataset": dataset, "split": split, **evaluation.to_dict(), "class_names": names}
            )
        )
        return
    print(evaluation.stats(names))
    print(f"{split} accuracy {evaluation.accuracy:.4f}, loss {evaluation.loss!r}")
    if trained.checkpoint is None and trained.summary is not None and not _chooses_data(overrides):
        scores, loss = trained.summary.scores, finite(evaluation.loss)  # as in JSON
        before = scores.test_accuracy if split == "test" else scores.validation_accuracy
        same = evaluation.accuracy == before and (split != "test" or loss == scores.test_loss)
        if before is None:  # a trial of a search, or a stopped run
            print(f"summary.json has no accuracy on {split} images")
        else:
            stored = f"accuracy {before}" + f", loss {scores.test_loss!r}" * (split == "test")
            equal = "the same" if split == "test" else "the same accuracy"
            print(f"{equal} as in summary.json" if same else f"summary.json has {stored}")


def evaluated(path: Path, overrides: Sequence[str] = ()) -> Evaluated:
    """Evaluate a run or a checkpoint on its test set, or else on its validation or training images."""
    from cupynet.config.experiment import Experiment
    from cupynet.config.instantiate import with_class_weights
    from cupynet.config.load_model import LoadedRun

    trained = LoadedRun(path)
    summary = trained.summary
    own = [] if summary is None else [f"workers={summary.setup.workers}"]
    settings = without_training(trained.settings([*own, *overrides]))
    if settings.trusted_modules:
        trained = LoadedRun(path, settings.trusted_modules)
    names = [name_of(override) for override in overrides]
    other = any(name in ("data", "data.folder", "data.file") or name.endswith(("_images", "_labels")) for name in names)
    if other:
        settings = replace(settings, data=_as_trained(settings, trained, names))
    if trained.normalize is not None and not any(name.startswith("data.normalize") for name in names):
        settings = replace(settings, data={**settings.data, "normalize": trained.normalize})
    if trained.class_weights is not None:  # do not rebalance for other data
        settings = replace(settings, loss=with_class_weights(settings.loss, trained.class_weights))
    experiment = Experiment(settings, trains=False)
    weights, data = trained.weights, experiment.load()
    before = "" if summary is None else SMOKE_TEST.sub("", summary.setup.dataset)
    if before not in ("", data.name) and not _chooses_data(overrides):  # for example, only the fallback is found now
        raise DataError(f"the run used {before}, but only {data.name} was found. Restore {before} or set data=...")
    found, stored = experiment.source.class_names, trained.class_names
    if found and stored and [*found] != [*stored]:
        raise DataError(f"the classes of the data, {shown(found)}, differ from the classes of the run, {shown(stored)}")
    with experiment.wrapper(callbacks=()) as wrapper:
        try:
            wrapper.model.load_weights(weights)
        except ConfigError as error:
            shapes = experiment.source.image_shape, trained.model("numpy", "float").input.shape
            if tuple(shapes[0]) != tuple(shapes[1]):
                here, there = (" x ".join(map(str, shape)) for shape in shapes)
                reason = f"has images of {here}, but the run was trained on {there}. Choose images of this size"
                raise ConfigError(reason, "data") from error
            raise DataError(f"{path}: {error}") from error
        sets = ("test", data.test), ("validation", data.validation), ("test" if other else "train", data.train)
        split, dataset = next((split, found) for split, found in sets if found)
        if other and dataset is data.train and "data.validation" not in names:
            held_out = trained.own_settings.data.get("validation")
            if held_out:
                log.warning(
                    "all %d images of %s are evaluated. If the run was trained on them, add data.validation=%s to "
                    "evaluate only the held-out images",
                    *(len(dataset), data.name, held_out),
                )
        evaluation = wrapper.evaluate(experiment.evaluation_loader(dataset))
        return Evaluated(evaluation, data.name, split, wrapper.model.class_names, trained)


def _as_trained(settings: Settings, trained: LoadedRun, names: Sequence[str]) -> dict[str, Any]:
    """Take null sizes and classes of other data from the run. Disable the validation split unless `names` set it.

    Raise ConfigError if the images have another number of channels.
    """
    from cupynet.config.instantiate import build_as
    from cupynet.data import Source

    model, data = trained.model("numpy", "float"), settings.data
    height, width, channels = model.input.shape
    own = {"size": [height, width], "channels": channels, "classes": model.output.features}
    own["class_names"] = [*model.class_names] or None
    left_open = {name: value for name, value in own.items() if data.get(name, 0) is None}
    whole = {} if "data.validation" in names or "validation" not in data else {"validation": 0}
    data = {**data, **left_open, **whole}
    found = build_as(Source, data, "data", settings.trusted_modules).image_shape[-1]  # type: ignore[type-abstract]
    if found != channels:
        reason = f"has images with {counted(found, 'channel')}, but the run was trained on {channels}"
        raise ConfigError(f"{reason}. Choose data with the same number of channels", "data")
    return data


def _chooses_data(overrides: Sequence[str]) -> bool:
    return any(name_of(override).split(".")[0] == "data" for override in overrides)


def without_training(settings: Settings) -> Settings:
    """Reset the settings that only training needs, because they may refer to user classes."""
    idle = {"_target_": "cupynet.optim.SGD", "learning_rate": 1.0}
    averaging = replace(
        settings.parallel, launcher="thread", synchronizer={"_target_": "cupynet.parallel.ParameterAveraging"}
    )
    data = {name: [] if name == "augment" else value for name, value in settings.data.items()}
    settings = replace(settings, weights=None, freeze=[], learning_rate_factors=None)
    return replace(settings, callbacks={}, optimizer=idle, parallel=averaging, data=data)
