"""The command line of `cupynet tune`: the search space, and the settings that all trials share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.config import resume
from cupynet.config.schema import TuneSettings, own_names
from cupynet.config.search_space import ends, values, written
from cupynet.core.checks import kept_out, one_line
from cupynet.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

MAY_DIFFER = ("trials", "timeout_s", "trusted_modules")  # when a search is resumed
REFERENCE = re.compile(r"\$\\*\{")  # Hydra removes backslashes: `$\{` becomes `${`
FEWEST = 20  # training images, for some to be held out
NOT_SEARCHED = ("resume", "trusted_modules", "experiment", "data.validation", "parallel.launcher")


def for_hydra(typed: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the arguments for Hydra, and the folder of the search to resume.

    The searched settings are moved into `search`. A resumed search gets the arguments it was started with.

    Raises:
        ConfigError: `-m`, or settings that cannot change when a search is resumed.
        DataError: the folder contains links or pipes, its files cannot be read, or its settings refer to something.
    """
    if {"-m", "--multirun"} & set(typed):
        raise ConfigError("-m: a search starts its trials itself: leave -m out")
    value = resume.asked(typed)
    now = [each for each in typed if _name(each) != "resume"]
    if value is None:
        return config.split(now), None
    folder = Path(value)
    if not (folder / resume.STUDY).is_file() or not (folder / ".hydra" / "overrides.yaml").is_file():
        raise ConfigError(f"resume={value}: is not the folder of a search: name one under outputs/tune/")
    resume.require_plain_files(folder)
    stored = config.overrides_of(folder, TuneSettings)
    for each in filter(_is_setting, now):
        if _name(each) not in MAY_DIFFER and each not in stored:
            raise ConfigError(f"{each}: when a search is resumed only {', '.join(MAY_DIFFER)} may change")
    for each in filter(REFERENCE.search, stored):
        raise DataError(f"{folder}: {one_line(each)}: a stored setting must be a plain value")
    changed = [*map(_name, now), "trusted_modules"]
    kept = [each for each in stored if _name(each) not in changed]
    return [*kept, *now, f"hydra.run.dir={resume.quoted(folder)}"], folder


def _name(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0].replace("/", ".")


def _is_setting(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


@dataclass(frozen=True)
class Plan:
    """A validated search.

    Attributes:
        settings: the settings of the search.
        space: the distribution of each searched setting.
        shared: the settings of all trials, as overrides.
        config_dir: the argument of --config-dir.
        resumed: the folder of the search to resume; None for a new one.
        typed: the arguments of this command line.
    """

    settings: TuneSettings
    space: Mapping[str, Any]
    shared: Sequence[str]
    config_dir: Path | None
    resumed: Path | None
    typed: Sequence[str]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """Return the settings of a trial."""
        return [*self.shared, *(f"{key}={written(each, params[key])}" for key, each in self.space.items())]


def prepare(arguments: Sequence[str], resumed: Path | None, typed_now: Sequence[str], settings: TuneSettings) -> Plan:
    """Refuse a search that cannot work before its first trial. ConfigError."""
    if find_spec("optuna") is None:
        raise ConfigError("cupynet tune needs Optuna, which is not installed: pip install 'cupynet[sweep]'")
    if resumed is None:
        _refuse_study(arguments)
    own = (*own_names(TuneSettings), "hydra")
    chosen = [each for each in arguments if _is_setting(each)]
    typed, shared = [_name(each) for each in chosen], [each for each in chosen if _name(each).split(".")[0] not in own]
    space = config.search_space(settings.search)
    if not space:
        raise ConfigError(
            "nothing is searched: write a setting as a range of values, such as "
            "optimizer.learning_rate='interval(0.001,0.3)' (--help shows more)"
        )
    if settings.parallel.launcher == "mpi":
        raise ConfigError("parallel.launcher=mpi: a search trains in threads: leave it out")
    for key, distribution in space.items():
        name = _name(key)
        if name in NOT_SEARCHED or name.split(".")[0] in own:
            raise ConfigError(f"{name}: is the same for all trials: give it a single value")
        if name in typed:
            raise ConfigError(f"{name}: is searched and also has a fixed value: remove one of the two")
        if settings.sampler == "grid" and values(distribution) is None:
            raise ConfigError(f"sampler=grid: {name} is continuous: write range(..) or choice(..), or sampler=tpe")
    plan = Plan(settings, space, shared, config.own_folder(arguments), resumed, typed_now)
    first, *others = _extremes(space)
    shared += _held_out(_experiment(plan, first), typed)
    for params in others:
        _experiment(plan, params)
    return plan


def _refuse_study(arguments: Sequence[str]) -> None:
    """Refuse to begin in the folder of another search. ConfigError."""
    for each in arguments:
        folder = Path(resume.unquoted(each.partition("=")[2]))
        if _name(each) == "hydra.run.dir" and (folder / resume.STUDY).exists():
            raise ConfigError(f"{folder}: holds a search: resume it with resume={folder}, or use another folder")


def _extremes(space: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings with each choice and each bound, one at a time, with the first value of all others."""
    first = {key: ends(each)[0] for key, each in space.items()}
    yield first
    for key, distribution in space.items():
        for value in ends(distribution)[1:]:
            yield {**first, key: value}


def _experiment(plan: Plan, params: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a trial. ConfigError."""
    from cupynet.config.experiment import Experiment

    try:
        settings = config.compose(plan.overrides(params), plan.config_dir)
        if plan.resumed is not None:
            config.check_outputs(settings.callbacks, plan.resumed, plan.typed)
            config.check_downloads(settings, plan.resumed, plan.typed)
        experiment = Experiment(settings)
        experiment.check_memory()
    except ConfigError as error:
        if "integer" in str(error).lower() and any(isinstance(value, float) for value in params.values()):
            raise ConfigError(f"{error}; int(interval(..)) gives integers") from None
        raise
    return experiment


def _held_out(experiment: Experiment, typed: Sequence[str]) -> list[str]:
    """Return the setting that holds out validation images, if there are none. ConfigError if none can be held out."""
    source: Any = experiment.source
    if getattr(source, "validation", True):
        return []
    images = source.expected().get("train", 0)
    if "data.validation" in typed or images < FEWEST:
        count = kept_out(images) if images else 1000
        raise ConfigError(f"a search compares trials by images held out of training: data.validation={count}")
    return [f"data.validation={kept_out(images)}"]
