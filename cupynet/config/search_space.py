"""Search spaces: `key=interval(..)`, `key=range(..)` and `key=choice(..)` as Optuna's distributions.

Without `-m` Hydra refuses such values. They are moved into the setting `search` before Hydra reads the command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Sweep,
    Transformer,
)
from hydra.errors import HydraException

from cupynet.core.checks import one_line
from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DIGITS = 12  # of the bounds of a range of fractions
WRITTEN_DIGITS = 6  # of a value on a command line
LOG_RATIO = 100  # intervals that span at least this factor are searched on a logarithmic scale
FORMS = "interval(0.001,0.1), int(interval(16,256)), range(1,9) or choice(32,64)"


def split(arguments: Sequence[str]) -> list[str]:
    """Move the searched values of a command line into one argument, `search=[..]`.

    Arguments that cannot be parsed are left to Hydra, which refuses them.
    """
    parser = OverridesParser.create()
    kept: list[str] = []
    found: list[object] = []
    for argument in arguments:
        override = _parsed(parser, argument)
        if override is not None and override.key_or_group == "search" and not override.is_sweep_override():
            value = override.value()
            found += value if isinstance(value, list) else [value]
        elif override is not None and override.is_sweep_override() and not override.is_hydra_override():
            found.append(argument)
        else:
            kept.append(argument)
    texts = [QuotedString(str(each).replace("${", "\\${"), Quote.single).with_quotes() for each in found]
    return [*kept, f"search=[{','.join(texts)}]"] if found else kept


def _parsed(parser: OverridesParser, argument: str) -> Override | None:
    if argument.startswith("-") or "=" not in argument:
        return None
    try:
        return parser.parse_override(argument)
    except HydraException:
        return None


def search_space(texts: Sequence[str]) -> dict[str, BaseDistribution]:
    """Return the distribution of each searched setting, by its key with the `+` or `++` written before it.

    Args:
        texts: of the setting `search`: `key=interval(..)` and so on.

    Raises:
        ConfigError: a text cannot be parsed, or leaves nothing to choose from.
    """
    parser = OverridesParser.create()
    space: dict[str, BaseDistribution] = {}
    for text in texts:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{one_line(text)}: is not written as key=value: {one_line(error)}") from error
        key = override.get_key_element()
        if key.lstrip("+") in [each.lstrip("+") for each in space]:
            raise ConfigError(f"{text}: {key.lstrip('+')} is searched twice: write one choice of all its values")
        try:
            space[key] = _distribution(override)
        except (HydraException, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{one_line(text)}: {one_line(error)}") from error
    return space


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    value = override.value()
    if not isinstance(value, Sweep) or override.is_delete() or override.package is not None:
        raise ValueError(f"is one value, with nothing to search: write {FORMS}")
    if isinstance(value, IntervalSweep):
        return _interval(value)
    if value.tags:
        raise ValueError("only intervals have a tag: tag(log, interval(..))")
    if isinstance(value, RangeSweep):
        return _range(value)
    if not isinstance(value, ChoiceSweep):
        raise ValueError("name the files to try: choice(a,b)")
    choices = dict.fromkeys(str(each) for each in override.sweep_iterator(Transformer.str))
    if len(choices) < 2:
        raise ValueError("is one value: write it without choice, or add another")
    return CategoricalDistribution(tuple(choices))


def _interval(value: IntervalSweep) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high = value.start, value.end
    if low is None or high is None or not math.isfinite(low) or not math.isfinite(high) or low >= high:
        raise ValueError("an interval needs a finite lower bound and a greater upper bound")
    if value.tags - {"log", "linear"} or len(value.tags) > 1:
        raise ValueError(f"tag({','.join(sorted(value.tags))}, ..): the tag must be log or linear")
    log = "log" in value.tags or (not value.tags and low > 0 and high / low >= LOG_RATIO)
    kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return kind(low, high, log=log)


def _range(value: RangeSweep) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    numbers = sorted(value.range()) if value.step else []
    if len(numbers) < 2:
        raise ValueError("there are fewer than two numbers in this range")
    if all(isinstance(each, int) for each in numbers):
        return IntDistribution(numbers[0], numbers[-1], step=abs(int(value.step)))
    low, high, step = (float(f"{each:.{DIGITS}g}") for each in (numbers[0], numbers[-1], abs(value.step)))
    return FloatDistribution(low, high, step=step)


def values(distribution: Any) -> list[Any] | None:
    """Return all values of a distribution; None if it is continuous."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    low, high, step = distribution.low, distribution.high, distribution.step
    return None if step is None else [low + i * step for i in range(round((high - low) / step) + 1)]


def ends(distribution: Any) -> list[Any]:
    """Return every choice, or the bounds of a number."""
    return list(getattr(distribution, "choices", None) or (distribution.low, distribution.high))


def written(distribution: Any, value: Any) -> str:
    """Return a value as it is written on a command line: numbers are rounded, within their bounds."""
    if not isinstance(value, float):
        return str(value)
    return str(min(max(float(f"{value:.{WRITTEN_DIGITS}g}"), distribution.low), distribution.high))
