"""Hyperparameter search: `cupynet tune optimizer.learning_rate='interval(0.001,0.3)' [key=value ...]`.

Trials are compared on validation images. The test images are used once, for the best trial.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.config import resume
from cupynet.config.command_line import MULTIRUN
from cupynet.config.overrides import is_override, last_value, name_of, quoted, without
from cupynet.config.schema import TuneSettings, own_names
from cupynet.config.search_space import lowest
from cupynet.core import signals
from cupynet.core.checks import one_of, without_prefix
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.exits import run_and_exit
from cupynet.core.terminal import near
from cupynet.core.wording import one_line
from cupynet.runs.layout import STUDY, TRIALS

if TYPE_CHECKING:
    from cupynet.commands.tune.search import Plan  # needs Optuna

MAY_DIFFER = ("trials", "timeout_s", "sampler", "trusted_modules")  # settings that may change when a search is resumed
PLACE = re.compile(
    r"callbacks\.\w+\.(uri|path|mode)"
)  # these may change too, because stored values are ignored (see `check_outputs`)
REFERENCE = re.compile(r"\$\\*\{")  # Hydra removes backslashes: `$\{` becomes `${`


def main() -> None:
    signals.command(lambda: run_and_exit(_command))


def _command() -> None:
    typed = sys.argv[1:]
    sys.argv[1:], resumed = for_hydra(typed)
    config.run(_search, partial(prepare, sys.argv[1:], resumed, typed), "tune", TuneSettings)


def _search(plan: Plan, folder: Path) -> float:
    from cupynet.commands.tune.search import search

    return search(plan, folder)


def for_hydra(typed: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the arguments for Hydra, and the folder of the search to resume, or None.

    The searched settings are collected in `search=[..]`. For a resumed search, the stored arguments are added.
    """
    if MULTIRUN & set(typed):
        raise ConfigError("cupynet tune does not support multirun. Remove it", "-m")
    for each in filter(is_override, typed):
        if name_of(each).startswith("hydra.sweep."):
            raise ConfigError("a search has one folder, which hydra.run.dir sets. Remove this setting", name_of(each))
    value = resume.asked(typed)
    now = without(typed, "resume")
    if value is None:
        return config.split(resume.without_latest(now)), None
    folder = resume.LATEST if value == "latest" else Path(value)
    if not os.path.isfile(folder / STUDY):  # isfile returns False for invalid names
        raise ConfigError("is not the folder of a search. Use a folder under outputs/tune/", "resume", value)
    if folder.is_symlink():  # the link may change during the search
        folder = Path(near(folder.resolve()))
    resume.require_plain_files(folder)
    if not (folder / STUDY).stat().st_size:
        raise DataError(f"{folder / STUDY}: the file is empty, so its trials are lost. Start a new search")
    stored = config.overrides_of(folder, TuneSettings)
    for each in filter(is_override, now):
        name = name_of(each)
        if name not in MAY_DIFFER and not PLACE.fullmatch(name) and each not in stored:
            raise ConfigError(f"{each}: when resuming a search, only {', '.join(MAY_DIFFER)} may change")
    for each in filter(REFERENCE.search, stored):
        raise DataError(f"{folder}: {one_line(each)}: a stored setting must be a plain value")
    changed = [*map(name_of, now), "trusted_modules"]
    kept = without(stored, *changed)
    added = [name_of(each) for each in stored if each.startswith("+")]  # changing these needs ++
    now = [f"++{each.lstrip('+')}" if name_of(each) in added and each[0] != "~" else each for each in now]
    return [*kept, *now, f"hydra.run.dir={quoted(folder)}"], folder


def prepare(arguments: Sequence[str], resumed: Path | None, typed: Sequence[str], settings: TuneSettings) -> Plan:
    if find_spec("optuna") is None:
        raise ConfigError("cupynet tune needs Optuna, which is not installed: pip install 'cupynet[sweep]'")
    from cupynet.commands.tune.search import Plan
    from cupynet.training import Evaluation

    folder = last_value(arguments, "hydra.run.dir")
    found = [name for name in (STUDY, TRIALS) if folder is not None and os.path.exists(Path(folder, name))]
    if found and resumed is None:
        remedy = f"Resume it with resume={folder}, or use another folder" if STUDY in found else "Use another folder"
        raise ConfigError(f"{folder}: already contains {found[0]} of a search. {remedy}")
    space = config.search_space(settings.search)
    if not space:
        raise ConfigError(
            "there is no setting to search. Use a range for a setting, such as seed='range(1,9)' (see --help)"
        )
    own = (*own_names(TuneSettings), "hydra")
    shared = [each for each in filter(is_override, arguments) if name_of(each).split(".")[0] not in own]
    fixed = [name_of(each) for each in shared]
    for name in map(name_of, space):
        if name in fixed:
            raise ConfigError("is searched, but also has a fixed value. Remove one of the two", name)
    plan = Plan(settings, space, shared, config.own_folder(), resumed, typed)
    check_choices(plan)
    source: Any = plan.experiment({key: lowest(each) for key, each in space.items()}).source
    figures = Evaluation(1, metrics=settings.metrics).figures()
    settings.objective = without_prefix(settings.objective, figures)
    one_of("objective", settings.objective, figures, ", or a metric that is listed in `metrics`")
    if not source.validates:
        images = source.expected().get("train", 0)
        if "data.validation" in fixed or not images:
            raise ConfigError("trials are compared on validation images, but there are none. Set data.validation=1000")
        shared.append(f"data.validation={kept_out(images)}")
    return plan


def check_choices(plan: Plan) -> None:
    """Raise ConfigError if a choice of a searched setting is invalid regardless of the other settings."""
    first = {key: lowest(each) for key, each in plan.space.items()}
    for key, each in plan.space.items():
        for choice in getattr(each, "choices", ()):
            try:
                config.compose(plan.overrides({**first, key: choice}), plan.config_dir)
            except ConfigError as error:
                if error.setting == name_of(key):  # otherwise combinations with other values may be valid
                    raise


def kept_out(images: int) -> int:
    """Return the number of training images to hold out: a tenth, but at least 1 and at most 5000."""
    return min(max(images // 10, 1), 5000)
