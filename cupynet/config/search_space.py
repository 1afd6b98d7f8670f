"""Search spaces: convert `interval(..)`, `range(..)` and `choice(..)` to Optuna's distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Transformer
from hydra.errors import HydraException

from cupynet.config.overrides import PARSER, is_override, name_of, quoted
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one_line

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DIGITS = 12  # decimal places to which float ranges are rounded
LOG_RATIO = 100  # intervals whose bounds have at least this ratio are searched on a logarithmic scale
FORMS = "interval(0.001,0.1), int(interval(16,256)), tag(log,interval(1,50)), range(1,9) or choice(32,64)"


def split(arguments: Sequence[str]) -> list[str]:
    """Collect the searched settings into one argument, `search=[..]`, because Hydra rejects sweeps without -m."""
    kept: list[str] = []
    found: list[str] = []
    for argument in arguments:
        if is_override(argument) and name_of(argument) == "search":
            example = "optimizer.learning_rate='interval(0.001,0.3)'"
            raise ConfigError(f"lists the searched settings. Give the ranges directly, such as {example}", "search")
        (found if _is_searched(argument) else kept).append(argument)
    texts = [quoted(each.replace("${", "\\${")) for each in found]
    return [*kept, f"search=[{','.join(texts)}]"] if found else kept


def _is_searched(argument: str) -> bool:
    try:
        override = PARSER.parse_override(argument)
    except HydraException:  # an invalid override, or an option
        return False
    return override.is_sweep_override() and not override.is_hydra_override()


def search_space(texts: Sequence[str]) -> dict[str, BaseDistribution]:
    """Return the distribution of each searched setting by its key, including a `+` or `++` prefix."""
    space: dict[str, BaseDistribution] = {}
    for text in texts:
        try:
            override = PARSER.parse_override(text)
            key = override.get_key_element()
            if key.lstrip("+") in [each.lstrip("+") for each in space]:
                raise ValueError("this setting is searched twice. Combine the values in one choice")
            space[key] = _distribution(override)
        except (HydraException, ValueError, TypeError) as error:
            setting, _, value = one_line(text).partition("=")
            raise ConfigError(one_line(error), setting, value or None) from error
    return space


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    if isinstance(value, ChoiceSweep):
        return CategoricalDistribution(list(dict.fromkeys(override.sweep_iterator(Transformer.str))))
    if isinstance(value, RangeSweep):
        numbers = sorted(value.range()) if value.step else []
        if not numbers:
            raise ValueError("the range is empty")
        low, high, step = (round(each, DIGITS) for each in (numbers[0], numbers[-1], abs(value.step)))
        if isinstance(step, int):
            return IntDistribution(low, high, step=step)
        return FloatDistribution(low, high, step=step)
    if not isinstance(value, IntervalSweep) or value.tags - {"log", "linear"}:
        raise ValueError(f"is not a search space. Use {FORMS}")
    low, high = cast("tuple[float, float]", (value.start, value.end))
    if not math.isfinite(high - low):
        raise ValueError("the bounds of an interval must be finite")
    log = "log" in value.tags or (not value.tags and low > 0 and high / low >= LOG_RATIO)
    return (IntDistribution if isinstance(low, int) else FloatDistribution)(low, high, log=log)


def lowest(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def rounded(value: Any) -> str:
    """Format a value of a searched setting, floats with six significant digits."""
    return str(float(f"{value:.6g}") if isinstance(value, float) else value)
