"""What a search varies: `key=interval(..)`, `choice(..)` and `range(..)`, as Hydra's grammar reads them.

Hydra itself takes such values for those of a sweep, each of which is a run of its own. Here they are taken out of the
command line before Hydra composes what all trials share, and become plain descriptions of what there is to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Transformer,
)
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cupynet.checks import one_line
from cupynet.config.explain import GROUPS
from cupynet.errors import ConfigError

DIGITS = 6  # of a number between two others: as many as anybody would type
WIDE = 100  # an interval whose end is so many times its beginning is searched by orders of magnitude
FORMS = "interval(0.001,0.1), int(interval(16,256)), range(1,9), choice(32,64)"


@dataclass(frozen=True)
class Searched:
    """A setting that a search varies.

    Attributes:
        key: of the setting, with the + or ++ that was written before it.
        text: how it was written, `key=interval(..)`.
        kind: `float`, `int` or `choice`.
        low, high: the least and the greatest number; 0 where there are choices.
        step: between numbers; None where all between low and high are meant.
        log: whether orders of magnitude count alike.
        choices: the values as they are written on a command line; empty where there are numbers.
    """

    key: str
    text: str
    kind: str
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key alone."""
        return self.key.lstrip("+")

    @property
    def values(self) -> list[Any] | None:
        """All that there is to choose from; None where that is endless."""
        if self.kind == "choice":
            return list(self.choices)
        if self.step is None:
            return None
        return [self.number(self.low + i * self.step) for i in range(round((self.high - self.low) / self.step) + 1)]

    @property
    def ends(self) -> list[Any]:
        """Values that say whether all are possible: every choice, or the least and the greatest number."""
        return list(self.choices) or [self.number(self.low), self.number(self.high)]

    def number(self, value: float) -> float | int:
        """A number as it is used: in a few digits, and never outside."""
        if self.kind == "int":
            return int(value)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def override(self, value: Any) -> str:
        """The setting with this value, as it is written on a command line."""
        return f"{self.key}={value}"

    def __str__(self) -> str:
        if self.kind == "choice":
            return ", ".join(self.choices)
        steps = f" in steps of {self.step:g}" if self.step not in (None, 1) else ""
        return f"{self.low:g} to {self.high:g}{steps}{', by orders of magnitude' * self.log}"


def split(arguments: Sequence[str]) -> list[str]:
    """A command line in which what is searched stands in the setting `search`, a list of texts.

    What cannot be read is left as it is: it is refused where all is composed.
    """
    parser = OverridesParser.create()
    kept: list[str] = []
    found: list[object] = []
    for argument in arguments:
        override = _parsed(parser, argument)
        if override is None:
            kept.append(argument)
        elif override.key_or_group == "search" and not override.is_sweep_override():
            given = override.value()
            found += given if isinstance(given, list) else [given]
        elif override.is_sweep_override() and not override.is_hydra_override():
            found.append(argument)
        else:
            kept.append(argument)
    texts = [QuotedString(str(each).replace("${", "\\${"), Quote.single).with_quotes() for each in found]
    return [*kept, f"search=[{','.join(texts)}]"] if found else kept


def _parsed(parser: OverridesParser, argument: str) -> Override | None:
    """An argument as a setting; None for an option, and for what cannot be read."""
    if argument.startswith("-") or "=" not in argument:
        return None
    try:
        return parser.parse_override(argument)
    except HydraException:
        return None


def searched(texts: Sequence[str]) -> list[Searched]:
    """What the setting `search` describes. ConfigError for what is no search, or has nothing to choose from."""
    parser = OverridesParser.create()
    found = [_searched(parser, text) for text in texts]
    for place, each in enumerate(found):
        if each.name in [other.name for other in found[:place]]:
            raise ConfigError(f"{each.text}: {each.name} is searched twice: write all there is to choose from as one")
    return found


def _searched(parser: OverridesParser, text: str) -> Searched:
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{one_line(text)}: is not written as key=value: {one_line(error)}") from error
    value = override.value()
    if not override.is_sweep_override() or override.is_delete() or override.package is not None:
        raise ConfigError(f"{one_line(text)}: is one value, and nothing to search: {FORMS}")
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        return _interval(key, text, value)
    if isinstance(value, RangeSweep):
        return _range(key, text, value)
    if not isinstance(value, ChoiceSweep):
        raise ConfigError(f"{text}: name the files that are to be tried: {key}=choice(a,b)")
    if value.tags:
        raise ConfigError(f"{text}: a tag is for an interval: tag(log, interval(..))")
    choices = tuple(dict.fromkeys(str(each) for each in override.sweep_iterator(Transformer.str)))
    if len(choices) < 2:
        raise ConfigError(f"{text}: is one value: write it without choice, or more of them")
    return Searched(key, text, "choice", choices=choices)


def _interval(key: str, text: str, value: IntervalSweep) -> Searched:
    low, high = value.start, value.end
    if low is None or high is None or not math.isfinite(low) or not math.isfinite(high) or low >= high:
        raise ConfigError(f"{text}: an interval goes from a number up to a greater one")
    if value.tags - {"log", "linear"} or len(value.tags) > 1:
        tags = ",".join(sorted(value.tags))
        raise ConfigError(f"{text}: tag({tags}, ..): a tag says how numbers count: log or linear")
    log = "log" in value.tags or (not value.tags and low > 0 and high / low >= WIDE)
    if log and low <= 0:
        raise ConfigError(f"{text}: by orders of magnitude nothing comes down to {low:g}: begin above 0")
    if isinstance(low, int) and isinstance(high, int):
        return Searched(key, text, "int", low, high, None if log else 1, log)
    return Searched(key, text, "float", float(low), float(high), None, log)


def _range(key: str, text: str, value: RangeSweep) -> Searched:
    if value.tags:
        raise ConfigError(f"{text}: a tag is for an interval: tag(log, interval(..))")
    try:
        numbers = sorted(value.range()) if value.step else []
    except (HydraException, ValueError, ArithmeticError):
        numbers = []
    if len(numbers) < 2:
        raise ConfigError(f"{text}: there are not two numbers in this range")
    whole = all(isinstance(each, int) for each in numbers)
    low, high, step = (float(f"{each:.{2 * DIGITS}g}") for each in (numbers[0], numbers[-1], abs(value.step)))
    if whole:
        return Searched(key, text, "int", numbers[0], numbers[-1], abs(value.step))
    return Searched(key, text, "float", low, high, step)


def as_file(overrides: Sequence[str], comments: Sequence[str] = ()) -> str:
    """A file of the group `experiment` that stands for these settings: files of groups, and values.

    What a command line takes out (`~`) no file can: that is told in a comment.
    """
    parser = OverridesParser.create()
    parsed = [parser.parse_override(each) for each in overrides]
    files, values, told = [], OmegaConf.create({}), [*comments]
    before: list[Any] = []
    for each in parsed:
        key, value = each.key_or_group, each.value()
        if each.is_delete():
            told.append(f"on the command line add: {one_line(each.input_line)}")
        elif key in GROUPS and isinstance(value, str) and key == "experiment":
            before.append(value)
        elif key in GROUPS and (value is None or isinstance(value, str)):
            files.append({f"override /{key}": value})
        elif key != "experiment":
            OmegaConf.update(values, key, value, merge=True, force_add=True)
    head = [f"# {line}" for line in told]
    defaults = OmegaConf.to_yaml(OmegaConf.create({"defaults": [*before, *files, "_self_"]}))
    return "\n".join(["# @package _global_", *head, defaults]) + (OmegaConf.to_yaml(values) if values else "")
