"""The settings of a run, with types, defaults and validators.

OmegaConf uses `Settings` as the schema of conf/ and checks names and types. Settings with several types are Any because
OmegaConf cannot merge into unions, and booleans are Any because OmegaConf accepts 2 as true. Arguments of classes are
validated by their constructors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from cupynet.core import checks, shared_options
from cupynet.core.errors import ConfigError
from cupynet.core.wording import nearest, shown, written

LINKS = ("wan", "1gbe", "10gbe", "100gbe", "nvlink")  # see cupynet.bench.cost_model

Rule = Callable[..., Any]  # (dotted key, value, **bounds) -> validated value


@dataclass(kw_only=True)
class Group:
    """Base class of groups of settings. Fields are declared with `setting`, `group` and `part`."""


G = TypeVar("G", bound=Group)


def as_is(key: str, value: Any) -> Any:
    return value


def setting(default: Any, check: Rule = as_is, **bounds: Any) -> Any:
    """Declare a setting with a default and a validator. Null is allowed only if it is the default."""
    bounded = partial(check, **bounds)

    def rule(key: str, value: Any) -> Any:
        return None if value is None and default is None else bounded(key, value)

    metadata = {"rule": as_is if check is as_is else rule, "check": bounded}
    if isinstance(default, list):
        return field(default_factory=partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type[Group]) -> Any:
    """Declare a nested group, whose defaults are in conf/."""
    return field(metadata={"rule": lambda key, value: read(kind, value, key), "group": kind})


def part(**default: Any) -> Any:
    """Declare a part, an object that is built from its `_target_`. It is required unless `default=None`."""
    return field(metadata={"rule": as_is}, **default)


# rules ----------------------------------------------------------------------------------------------------------------


def memory(key: str, value: Any, *, share: bool = False) -> Any:
    try:
        size(value, share)
    except ValueError:
        form = f"bytes, an amount such as 2GiB{', a share of the device such as 80%' * share}, or null"
        raise ConfigError(f"must be {form}", key, shown(value, written)) from None
    return value


def count_or_flag(key: str, value: Any) -> bool | int:
    return bool(value) if checks.is_bool(value) else checks.integer(key, value, 1, ", or true or false")


def integers(key: str, value: Any) -> list[int]:
    """Validate an integer, or a list of integers, of at least 1. Return them sorted, without duplicates."""
    found = value if value and isinstance(value, list) else [value]
    return sorted({checks.integer(key, each, 1, ", or a list of them such as [2,8,64]") for each in found})


def factors(key: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError("must be {pattern: factor}, or null", key, shown(value, written))
    return {str(name): checks.number(f"{key}.{name}", each, minimum=0) for name, each in value.items()}


def link(key: str, value: Any) -> str | dict[str, float]:
    """Validate a network link, given by its name or by its bandwidth and latency."""
    if not isinstance(value, Mapping) or set(value) != {"bandwidth_gbit_s", "latency_us"}:
        return checks.one_of(key, value, [*LINKS, "{bandwidth_gbit_s:10,latency_us:25}"])
    return {
        "bandwidth_gbit_s": checks.number(f"{key}.bandwidth_gbit_s", value["bandwidth_gbit_s"], above=0),
        "latency_us": checks.number(f"{key}.latency_us", value["latency_us"], minimum=0),
    }


def size(value: object, share: bool = False) -> int | float:
    """Parse an amount of memory, such as 2147483648, "2GB" or "2GiB", into bytes.

    If `share` is True, a percentage such as "80%" is returned as a float in (0, 1]. Raises ValueError if invalid.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b|%|)", str(value).strip(), re.IGNORECASE)
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if unit == "%" and share and 0 < number <= 100:
        return number / 100
    amount = 0.0 if unit == "%" else number * (1024 if "i" in unit else 1000) ** "bkmgt".index(unit[:1] or "b")
    if not 1 <= amount < checks.LONGEST:
        raise ValueError(f"{value} is not an amount of memory")
    return int(amount)


# the settings ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PrioritySettings(Group):
    """Priorities for `backend.name=auto`: the available backend with the highest priority is used."""

    gpu: int = setting(100)
    cpu: int = setting(0)


@dataclass(kw_only=True)
class BackendSettings(Group):
    name: str = setting("auto", checks.one_of, names=("auto", *shared_options.BACKENDS))
    priority: PrioritySettings = group(PrioritySettings)
    max_block_size: int = setting(256, shared_options.block_size)
    max_grid_size: int | None = setting(None, shared_options.grid_size)
    tf32: Any = setting(False, checks.flag)


@dataclass(kw_only=True)
class MemorySettings(Group):
    """Limits for CuPy's memory pools, and placement of the data set."""

    device_pool_limit: Any = setting(None, memory, share=True)
    device_pool_trim_above: Any = setting(None, memory)
    pinned_pool_trim_above: int | None = setting(None, checks.integer, minimum=0)
    data_on_device: Any = setting("auto", shared_options.on_device)


@dataclass(kw_only=True)
class ParallelSettings(Group):
    """Settings for replicas and pipelines. The arguments of the synchronizer refer to them."""

    averaging_frequency: Any = setting(3)
    prefetch_buffer: int = setting(24, shared_options.prefetch_buffer)
    report_score_after_averaging: Any = setting(True, checks.flag)
    average_updaters: Any = setting(True, checks.flag)
    learning_rate_scale: Any = setting("none", shared_options.learning_rate_scale)
    timeout_s: float = setting(300.0, shared_options.timeout_s)
    launcher: str = setting("thread", shared_options.launcher)
    reduce: str = setting("auto", shared_options.reduce)
    synchronizer: Any = part()
    pipeline: Any = part(default=None)


@dataclass(kw_only=True)
class Settings(Group):
    """The settings of a run, documented in conf/config.yaml."""

    workers: int | None = setting(None, shared_options.workers)
    dtype: str = setting("float", shared_options.dtype)
    seed: int = setting(123, checks.seed)
    epochs: int = setting(10, checks.integer, minimum=1)
    batch_size: int = setting(128, checks.integer, minimum=1)
    accumulation_steps: int = setting(1, shared_options.accumulation_steps)
    devices: list[int] | None = setting(None)
    evaluate_every_epochs: int = setting(1, checks.integer, minimum=1)
    log_every: int = setting(50, shared_options.log_every)
    metrics: list[str] = setting([])
    trusted_modules: list[str] = setting([])
    profile: Any = setting(False, count_or_flag)
    resume: str | None = setting(None)
    weights: str | None = setting(None)
    freeze: list[str] = setting([])
    learning_rate_factors: Any = setting(None, factors)
    backend: BackendSettings = group(BackendSettings)
    memory: MemorySettings = group(MemorySettings)
    data: Any = part()
    model: Any = part()
    loss: Any = part()
    optimizer: Any = part()
    parallel: ParallelSettings = group(ParallelSettings)
    callbacks: dict[str, Any] = part()


@dataclass(kw_only=True)
class BenchSettings(Settings):
    """The settings of `cupynet bench`, documented in conf/bench.yaml."""

    peers: str | None = setting(None, checks.one_of, names=("torch",))
    repeats: int = setting(5, checks.integer, minimum=1)
    images: int = setting(60000, checks.integer, minimum=1)
    gpu: Any = setting(False, checks.flag)
    seeds: int = setting(5, checks.integer, minimum=1)


@dataclass(kw_only=True)
class PlanSettings(Settings):
    """The settings of `cupynet plan`, documented in conf/plan.yaml. `workers` is a list."""

    workers: Any = setting(None, integers)
    link: Any = setting("10gbe", link)
    frequencies: Any = setting(None, integers)
    machines: int | None = setting(None, checks.integer, minimum=1)
    cores_per_machine: int | None = setting(None, checks.integer, minimum=1)
    check: Any = setting(False, checks.flag)
    repeats: int = setting(3, checks.integer, minimum=1)
    images: int = setting(20000, checks.integer, minimum=1)

    @property
    def asked(self) -> list[int]:
        """The numbers of workers for which to predict the throughput, sorted."""
        return list(self.workers or ([1, 2, 4] if self.check else [2, 8, 64, 1024]))

    @property
    def every(self) -> list[int]:
        """The averaging frequencies for which to predict the throughput, sorted."""
        return list(self.frequencies or ([3] if self.check else [1, 3, 10, 50]))

    def run(self, workers: int | None) -> Settings:
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)} | {"workers": workers})


def own_names(kind: type[Settings]) -> list[str]:
    return list(kind.__annotations__)


@dataclass(kw_only=True)
class TuneSettings(Settings):
    """The settings of `cupynet tune`, documented in conf/tune.yaml."""

    search: list[str] = setting([])
    trials: int = setting(20, checks.integer, minimum=1)
    timeout_s: float | None = setting(None, shared_options.timeout_s)
    objective: str = setting("accuracy")
    sampler: str = setting("tpe", checks.one_of, names=("tpe", "random"))
    sampler_seed: int = setting(0, checks.seed)
    pruner: str = setting("median", checks.one_of, names=("median", "hyperband", "none"))


@dataclass(kw_only=True)
class RateSettings(Settings):
    """The settings of `cupynet find_rate`, documented in conf/find_rate.yaml."""

    lowest: float = setting(1e-6, checks.number, above=0)
    highest: float = setting(10.0, checks.number, above=0)
    iterations: int = setting(200, checks.integer, minimum=10)


# reading --------------------------------------------------------------------------------------------------------------


def read(kind: type[G], given: Mapping[str, Any], above: str = "") -> G:
    """Create settings from plain values, with nested mappings for groups. Types were checked by the schema.

    above: the dotted key of the mapping; "" at the top.
    """
    known = {each.name: each for each in fields(kind)}
    for name in (name for name in given if name not in known):  # settings added with +
        key = _below(above, name)
        hint = nearest(key, (_below(above, other) for other in known))
        raise ConfigError(f"there is no setting '{key}'{hint}", key, shown(given[name], written))
    values = {}
    for each in known.values():
        key = _below(above, each.name)
        if each.name in given:
            values[each.name] = each.metadata["rule"](key, given[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            remedy = "" if above else ". A file for --config-name needs `defaults: [config, _self_]`"
            raise ConfigError(f"is missing{remedy}", key)
    return kind(**values)


def rules(kind: type[Group], above: str = "") -> Iterator[tuple[str, Rule]]:
    """Yield (dotted key, validator) of every setting, each group before its settings."""
    for each in fields(kind):
        key = _below(above, each.name)
        yield key, each.metadata["rule"]
        if "group" in each.metadata:
            yield from rules(each.metadata["group"], key)


def _below(above: str, name: str) -> str:
    return f"{above}.{name}" if above else name
