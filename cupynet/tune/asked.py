"""What a search is asked for: its command line, what all its trials share, and what it is refused for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config, resume
from cupynet.checks import kept_out
from cupynet.errors import ConfigError
from cupynet.settings import TuneSettings, own_names

if TYPE_CHECKING:
    from cupynet.config import Searched
    from cupynet.experiment import Experiment

MAY_DIFFER = ("trials", "timeout_s", "jobs", "trusted_modules")  # where a search goes on
MOST_CHECKED = 60  # settings that are composed before the first trial
FEWEST = 20  # training images, for some to be kept out
NOT_SEARCHED = ("resume", "trusted_modules", "experiment", "data.validation", "parallel.launcher")


@dataclass(frozen=True)
class Given:
    """What was typed.

    Attributes:
        arguments: for Hydra: what is searched stands in `search`, and a search that goes on has its own command line.
        resumed: its folder; None for a new one.
    """

    arguments: list[str]
    resumed: Path | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Given:
        """ConfigError, DataError: what is to be gone on with is no search."""
        value = resume.asked(arguments)
        if {"-m", "--multirun"} & set(arguments):
            raise ConfigError("-m: a search begins its runs itself: leave -m out")
        now = [each for each in arguments if _name(each) != "resume"]
        if value is None:
            return cls(config.split(now))
        folder = Path(value)
        if not (folder / "study.db").is_file() or not (folder / ".hydra" / "overrides.yaml").is_file():
            raise ConfigError(f"resume={value}: is not the folder of a search: name one under outputs/tune/")
        resume.refuse_links(folder)
        for each in filter(_is_setting, now):
            if _name(each) not in MAY_DIFFER:
                raise ConfigError(f"{each}: where a search goes on only {', '.join(MAY_DIFFER)} may be others")
        names = [*map(_name, now), "trusted_modules"]
        kept = [each for each in config.overrides_of(folder, TuneSettings) if _name(each) not in names]
        own = None if config.own_folder(now) is not None else config.own_folder_of(folder)
        return cls(
            [*kept, *now, f"hydra.run.dir={resume.quoted(folder)}", *([] if own is None else [f"--config-dir={own}"])],
            folder,
        )

    @cached_property
    def settings(self) -> list[str]:
        """What all trials share, but for options."""
        own = (*own_names(TuneSettings), "hydra")
        return [each for each in self.arguments if _is_setting(each) and _name(each).split(".")[0] not in own]

    @cached_property
    def folder(self) -> Path | None:
        """Of files of one's own, as --config-dir names it."""
        return config.own_folder(self.arguments)

    @property
    def shared(self) -> list[str]:
        """What all trials share, as arguments of `cupynet.train`."""
        return [*([] if self.folder is None else [f"--config-dir={self.folder}"]), *self.settings]

    @property
    def names(self) -> list[str]:
        """The settings that were typed."""
        return [_name(each) for each in self.arguments if _is_setting(each)]


def _name(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0].replace("/", ".")


def _is_setting(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


@dataclass(frozen=True)
class Asked:
    """A search that can begin.

    Attributes:
        space: what is searched.
        shared: what all trials share, as arguments of `cupynet.train`.
        held_out: the setting that was added to these, so that there are validation images; "" where there were.
        workers: of each trial, where it trains alone; None where the settings say it.
        epochs: of a trial, at most.
        devices: to be shared out between trials; none on a CPU, or where the settings name some.
        resumed: whether it goes on.
    """

    settings: TuneSettings
    space: list[Searched]
    shared: list[str]
    held_out: str
    workers: int | None
    epochs: int
    devices: list[int]
    resumed: bool


def prepare(given: Given, settings: TuneSettings) -> Asked:
    """Refuse what cannot work, in any of the trials, before anything is tried. ConfigError."""
    space = config.searched(settings.search)
    _check_names(space, given)
    if settings.parallel.launcher == "mpi":
        raise ConfigError("parallel.launcher=mpi: a search trains in threads: leave it out, or try jobs=2")
    _check_sampler(settings, space)
    if find_spec("optuna") is None:
        raise ConfigError("cupynet.tune needs Optuna, which is not installed: pip install 'cupynet[sweep]'")
    if given.resumed is None:
        _refuse_study(given.arguments)
    firsts = [each.override(each.ends[0]) for each in space]
    experiment = _experiment([*given.settings, *firsts], given.folder, space)
    held_out = _held_out(experiment, given.names)
    for overrides in itertools.islice(_combinations(space), 1, MOST_CHECKED):
        _experiment([*given.settings, *([held_out] if held_out else []), *overrides], given.folder, space)
    epochs = next((int(max(map(int, each.ends))) for each in space if each.name == "epochs"), settings.epochs)
    told = (*given.names, *(each.name for each in space))
    devices = [] if "devices" in told else list(experiment.placement.devices)
    workers = None if settings.workers is not None or "workers" in told else experiment.placement.workers
    shared = [*given.shared, *([held_out] if held_out else [])]
    return Asked(settings, space, shared, held_out, workers, epochs, devices, given.resumed is not None)


def _check_names(space: Sequence[Searched], given: Given) -> None:
    """Refuse to search nothing, or what is no setting of a trial. ConfigError."""
    if not space:
        raise ConfigError(
            "nothing is searched: write some settings as what there is to choose from, such as "
            "optimizer.learning_rate='interval(0.001,0.3)' (--help has more)"
        )
    own = (*own_names(TuneSettings), "hydra")
    for each in space:
        if each.name in NOT_SEARCHED or each.name.replace("/", ".").split(".")[0] in own:
            raise ConfigError(f"{each.text}: {each.name} is the same for all trials: give it one value")
        if each.name in given.names:
            raise ConfigError(f"{each.text}: {each.name} is given one value too: leave one of the two out")


def _check_sampler(settings: TuneSettings, space: Sequence[Searched]) -> None:
    """Refuse to combine what is endless. ConfigError."""
    endless = next((each for each in space if each.values is None), None)
    if settings.sampler == "grid" and endless is not None:
        raise ConfigError(
            f"sampler=grid: {endless.text} has no end of values: write range(..) or choice(..), or take another sampler"
        )


def _refuse_study(arguments: Sequence[str]) -> None:
    """Refuse to begin in the folder of a search. ConfigError."""
    for each in arguments:
        name, _, value = each.partition("=")
        folder = Path(resume.unquoted(value))
        if name.lstrip("+") == "hydra.run.dir" and (folder / "study.db").exists():
            raise ConfigError(f"{folder}: holds a search: resume={folder} goes on with it; or name another folder")


def _experiment(overrides: Sequence[str], folder: Path | None, space: Sequence[Searched]) -> Experiment:
    """What such a trial would be. ConfigError."""
    from cupynet.experiment import Experiment

    try:
        experiment = Experiment(config.compose(overrides, folder))
        experiment.check_memory()
    except ConfigError as error:
        text = str(error)
        inexact = [each for each in space if each.kind == "float" and text.startswith(each.name) and "integer" in text]
        if inexact:
            text += f"; {inexact[0].key}='int({inexact[0].text.partition('=')[2]})' has integers alone"
        raise ConfigError(text) from None
    return experiment


def _combinations(space: Sequence[Searched]) -> Iterator[list[str]]:
    """Settings to be looked at: with every file of a group every value of the others, or both ends, one at a time."""
    groups = [each for each in space if "." not in each.name and each.name in config.GROUPS]
    others = [each for each in space if each not in groups]
    for files in itertools.product(*(each.choices for each in groups)):
        chosen = [each.override(file) for each, file in zip(groups, files, strict=True)]
        first = [each.override(each.ends[0]) for each in others]
        yield [*chosen, *first]
        for place, each in enumerate(others):
            for value in each.ends[1:]:
                yield [*chosen, *first[:place], each.override(value), *first[place + 1 :]]


def _held_out(experiment: Experiment, typed: Sequence[str]) -> str:
    """The setting by which there are images to choose by; "" where there are some. ConfigError where none can be."""
    source: Any = experiment.source
    if getattr(source, "validation", True):
        return ""
    there = source.expected().get("train", 0)
    if "data.validation" in typed or there < FEWEST:
        none = "data.validation=0" if "data.validation" in typed else "data.validation"
        some = kept_out(there) if there else 1000
        raise ConfigError(f"{none}: a search chooses by images kept out of training: data.validation={some}")
    return f"data.validation={kept_out(there)}"
