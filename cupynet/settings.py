"""The settings of a run: a line for each, with its type, its default and the rule that says what it may be.

`Settings` is what a command works with: plain Python values, whatever they were read from. It is also the schema that
the configuration is composed against (config/). A group is a dataclass of its own. A part is open here: what a layer,
an optimizer or a source of data may be given is told by its constructor (parts.py).

The file is long because all settings and all their rules stand in one place.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from cupynet import checks
from cupynet.checks import guess, nearest, refusal, shown, written
from cupynet.errors import ConfigError

Rule = Callable[[str, Any], Any]  # (dotted key, value) -> the value as it is kept, or a ConfigError

MOST_WORKERS = 10_000
MOST_PREFETCHED = 100_000
MOST_FORECAST = 1_000_000
MOST_REPEATS = 1_000
MOST_MEASURED = 100_000_000
MOST_PROFILED = 10_000
MOST_TRIALS = 100_000
FOR_EVER = "measuring would take for ever"
AS_RANKS = "parallel.launcher=mpi"  # what a command is given where mpiexec starts it


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that belong together: its fields are made by `setting`, `group` and `part`."""


G = TypeVar("G", bound=Group)


def setting(default: Any, rule: Rule) -> Any:
    """A setting with its default value and its rule."""
    if isinstance(default, list):
        return field(default_factory=partial(list, default), metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


def group(kind: type[Group]) -> Any:
    """Settings that belong together, from a file of the configuration; no default here: that file has it."""
    return field(metadata={"rule": lambda key, value: read(kind, value, key), "group": kind})


def part(**default: Any) -> Any:
    """What is built from a `_target_`: anything here, its constructor decides. default: `default=None`, or none."""
    return field(metadata={"rule": lambda key, value: value}, **default)


# rules ----------------------------------------------------------------------------------------------------------------


def integer(minimum: int | None, *, null: str = "", also: str = "", **bounds: Any) -> Rule:
    """An integer of at least `minimum`; or null, which means `null`. `bounds` are those of `checks.integer`."""
    tail = (f", or null for {null}" if null else "") + also
    return lambda key, value: None if null and value is None else checks.integer(key, value, minimum, tail, **bounds)


def one_of(*names: str) -> Rule:
    """One of the names."""
    return lambda key, value: checks.one_of(key, value, names)


def only(name: str, *, null: str) -> Rule:
    """The name, or null, which means `null`."""

    def rule(key: str, value: Any) -> str | None:
        if value not in (None, name):
            raise refusal(key, written(value), f"must be {name}, or null for {null}")
        return None if value is None else name

    return rule


def seconds(key: str, value: Any) -> float:
    """How long to wait; no thread can wait longer than TIMEOUT_MAX."""
    return checks.number(key, value, above=0, below=threading.TIMEOUT_MAX, unit="seconds")


def positive(key: str, value: Any) -> float:
    """A number above 0."""
    return checks.number(key, value, above=0)


def memory(*, share: bool) -> Rule:
    """An amount of memory as `size` reads it, or null for no bound."""

    def rule(key: str, value: Any) -> Any:
        try:
            return value if value is None else (size(value, share), value)[1]
        except ValueError:
            form = f"bytes, an amount such as 2GiB{', a share of the device such as 80%' * share}, or null"
            raise refusal(key, written(value), f"must be {form}") from None

    return rule


def frequency(key: str, value: Any) -> int | str | None:
    """Iterations between averages, or one of two moments; or null, where no averages are counted."""
    moments = ("epoch", "end")
    if value is None or (isinstance(value, str) and value in moments):
        return value
    return checks.integer(key, value, 1, f", epoch or end{guess(value, moments)}")


def profile(key: str, value: Any) -> bool | int:
    """Whether rounds are timed piece by piece, or how many."""
    if checks.is_bool(value):
        return bool(value)
    return checks.integer(key, value, 1, ", or true or false", most=MOST_PROFILED, why="the file grows with them")


def integers(most: int | None = None) -> Rule:
    """Different integers of at least 1, in order, one alone also without brackets; or null for what is usual."""

    def rule(key: str, value: Any) -> list[int] | None:
        given = value if isinstance(value, list) else [value]
        try:
            found = sorted({checks.integer(key, each, 1, most=most) for each in given})
        except ConfigError:
            found = []
        if value is not None and not found:
            bound = "" if most is None else f" and at most {most}"
            what = f"must be an integer of at least 1{bound}, a list of them such as [2,8,64], or null"
            raise refusal(key, shown(value, written), what)
        return found or None

    return rule


def link(key: str, value: Any) -> str | dict[str, float]:
    """A link by name, or by its bandwidth and latency."""
    if isinstance(value, str) and value in checks.LINKS:
        return value
    wanted = {"bandwidth_gbit_s", "latency_us"}
    if not isinstance(value, Mapping) or set(value) != wanted:
        forms = f"{', '.join(checks.LINKS)}, or {{bandwidth_gbit_s:10,latency_us:25}}"
        form = f"must be one of {forms}{guess(value, checks.LINKS)}"
        raise refusal(key, shown(value, written), form)
    try:
        bandwidth = checks.number("bandwidth_gbit_s", value["bandwidth_gbit_s"], above=0)
        latency = checks.number("latency_us", value["latency_us"], minimum=0)
    except checks.Refusal as wrong:
        raise refusal(key, shown(value, written), str(wrong)) from None
    return {"bandwidth_gbit_s": bandwidth, "latency_us": latency}


def devices(key: str, value: Any) -> list[int] | None:
    """Device numbers, none twice, or null."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(number) is not int or number < 0 for number in value):
        raise refusal(key, written(value), "must be a list of device numbers such as [0,2], or null for all")
    if len(set(value)) < len(value):
        raise refusal(key, written(value), "names a device twice")
    return value


def few_batches(key: str, value: Any) -> bool | int:
    """How many batches of everything; 1 for true, or false."""
    if isinstance(value, bool):
        return int(value) or False
    return checks.integer(key, value, 1, ", true for 1 or false")


def resumed(key: str, value: Any) -> str | None:
    """A path, or null."""
    if value is not None and (not isinstance(value, str) or not value):
        raise refusal(key, written(value), "must be latest, the folder of a run or of a checkpoint, or null")
    return value


def unless_null(rule: Rule, null: str) -> Rule:
    """What another rule says, or null, which means `null`."""

    def checked(key: str, value: Any) -> Any:
        try:
            return None if value is None else rule(key, value)
        except checks.Refusal as wrong:
            raise refusal(key, shown(value, written), f"{wrong.reason}, or null for {null}") from None

    return checked


def texts(key: str, value: Any) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refusal(key, shown(value, written), "must be a list of texts such as ['batch_size=choice(32,64)']")
    return list(value)


def modules(key: str, value: Any) -> list[str]:
    """Dotted names of Python modules."""
    if not isinstance(value, list) or not all(
        isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in value
    ):
        raise refusal(key, written(value), "must be a list of Python modules such as [mynet,mynet.layers]")
    return value


def parts(key: str, value: Any) -> dict[str, Any]:
    """Parts by name; null where one was taken out."""
    if not isinstance(value, Mapping):
        raise refusal(key, written(value), "must be parts by name, each with a _target_, or null")
    for name, item in value.items():
        if item is not None and not isinstance(item, Mapping):
            wrong = f"{_below(key, name)}={shown(item, written)}"
            raise ConfigError(f"{wrong}: must be a part with a _target_, or null for none")
    return dict(value)


def size(value: object, share: bool = False) -> int | float:
    """An amount of memory: bytes as an int, from 2147483648 or "2GiB"; with `share` a device's share too, from "80%".

    kB MB GB TB are powers of 1000, KiB MiB GiB TiB of 1024. A share is a float, 0 < share <= 1. ValueError otherwise.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b|%|)", str(value).strip(), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value} is not an amount of memory")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not share or not 0 < number <= 100:
            raise ValueError(f"{value} is not a share of the device's memory")
        return number / 100
    if "." in match[1] and unit in ("", "b"):
        raise ValueError(f"{value} is not a whole number of bytes")
    amount = number * (1024 if "i" in unit else 1000) ** "bkmgt".index(unit[:1] or "b")
    if amount >= checks.LONGEST:
        raise ValueError(f"{value} is more than memory is counted in")
    amount = int(amount)
    if amount < 1:
        raise ValueError(f"{value} is no memory at all")
    return amount


# the settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrioritySettings(Group):
    """Of the kinds of backend that work here `auto` takes the one with the higher number."""

    gpu: int = setting(100, integer(None, also="; by default it is BACKEND_PRIORITY_GPU of the environment"))
    cpu: int = setting(0, integer(None, also="; by default it is BACKEND_PRIORITY_CPU of the environment"))


@dataclass(frozen=True, kw_only=True)
class BackendSettings(Group):
    """What computes."""

    name: str = setting("auto", one_of("auto", *checks.BACKENDS))
    priority: PrioritySettings = group(PrioritySettings)
    max_block_size: int = setting(256, checks.block_size)
    max_grid_size: int | None = setting(None, checks.grid_size)
    tf32: bool = setting(False, checks.flag)


@dataclass(frozen=True, kw_only=True)
class MemorySettings(Group):
    """Bounds of CuPy's memory pools, and what stays on the devices."""

    device_pool_limit: int | str | None = setting(None, memory(share=True))
    device_pool_trim_above: int | str | None = setting(None, memory(share=False))
    pinned_pool_trim_above: int | None = setting(None, integer(0, null="never"))
    data_on_device: bool | str = setting("auto", checks.on_device)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Group):
    """How the replicas are kept together, or shared out. The parts refer to the settings beside them."""

    averaging_frequency: int | str | None = setting(3, frequency)
    prefetch_buffer: int = setting(24, integer(0, most=MOST_PREFETCHED, why="every batch prepared ahead takes memory"))
    report_score_after_averaging: bool = setting(True, checks.flag)
    average_updaters: bool = setting(True, checks.flag)
    learning_rate_scale: float | str = setting("none", checks.learning_rate_scale)
    timeout_s: float = setting(300.0, seconds)
    launcher: str = setting("thread", one_of("thread", "mpi"))
    reduce: str = setting("auto", one_of("auto", "nccl", "device", "host"))
    synchronizer: Any = part()
    pipeline: Any = part(default=None)


@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """One run. conf/config.yaml says what each setting means; a group is made by one of its files there."""

    workers: int | None = setting(
        None, integer(1, null="one per device", most=MOST_WORKERS, why="every worker is a thread with its own replica")
    )
    dtype: str = setting("float", checks.dtype)
    seed: int = setting(123, checks.seed)
    epochs: int = setting(10, integer(1))
    batch_size: int = setting(128, integer(1))
    accumulate: int = setting(1, integer(1))
    devices: list[int] | None = setting(None, devices)
    evaluate_every_epochs: int = setting(1, integer(1))
    report_every_iterations: int = setting(50, integer(1))
    trusted_modules: list[str] = setting([], modules)
    fast_dev_run: bool | int = setting(False, few_batches)
    profile: bool | int = setting(False, profile)
    resume: str | None = setting(None, resumed)
    backend: BackendSettings = group(BackendSettings)
    memory: MemorySettings = group(MemorySettings)
    data: Any = part()
    model: Any = part()
    loss: Any = part()
    optimizer: Any = part()
    parallel: ParallelSettings = group(ParallelSettings)
    callbacks: dict[str, Any] = field(metadata={"rule": parts})


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """The settings of `cupynet.bench`: those of the run it measures, and what conf/bench.yaml adds."""

    peers: str | None = setting(None, only("torch", null="none"))
    repeats: int = setting(5, integer(1, most=MOST_REPEATS, why=FOR_EVER))
    images: int = setting(60000, integer(1, most=MOST_MEASURED, why=FOR_EVER))
    workers_memory: bool = setting(False, checks.flag)
    gpu: bool = setting(False, checks.flag)
    seeds: int = setting(5, integer(1, most=MOST_REPEATS, why=FOR_EVER))


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """The settings of `cupynet.plan`: those of the run it measures, and what conf/plan.yaml adds.

    `workers` is a list here: the numbers of workers to forecast. See `asked` and `every` for null.
    """

    workers: Any = setting(None, integers(most=MOST_FORECAST))
    link: str | dict[str, float] = setting("10gbe", link)
    frequencies: Any = setting(None, integers())
    machines: int | None = setting(None, integer(1, null="as many as the workers fill"))
    cores_per_machine: int | None = setting(None, integer(1, null="as many as here"))
    check: bool = setting(False, checks.flag)
    repeats: int = setting(3, integer(1, most=MOST_REPEATS, why=FOR_EVER))
    images: int = setting(20000, integer(1, most=MOST_MEASURED, why=FOR_EVER))

    @property
    def asked(self) -> list[int]:
        """Numbers of workers, in order."""
        return list(self.workers or ([1, 2, 4] if self.check else [2, 8, 64, 1024]))

    @property
    def every(self) -> list[int]:
        """Iterations between averages, in order."""
        return list(self.frequencies or ([3] if self.check else [1, 3, 10, 50]))

    def run(self, workers: int | None) -> Settings:
        """Return the settings of one run with so many workers."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)} | {"workers": workers})


def own_names(kind: type[Settings]) -> list[str]:
    """The settings that only this kind has, or that mean something else in it."""
    return list(kind.__annotations__)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """The settings of `cupynet.tune`: those that its trials share, and what conf/tune.yaml adds."""

    search: list[str] = setting([], texts)
    trials: int = setting(20, integer(1, most=MOST_TRIALS, why=FOR_EVER))
    timeout_s: float | None = setting(None, unless_null(seconds, "no limit"))
    objective: str = setting("accuracy", one_of(*checks.OBJECTIVES))
    sampler: str = setting("tpe", one_of("tpe", "random", "grid"))
    sampler_seed: int = setting(0, checks.seed)
    pruner: str = setting("median", one_of("median", "hyperband", "none"))


@dataclass(frozen=True, kw_only=True)
class RateSettings(Settings):
    """The settings of `cupynet.find_rate`: those of the run that is asked about, and what conf/find_rate.yaml adds."""

    lowest: float = setting(1e-6, positive)
    highest: float = setting(10.0, positive)
    iterations: int = setting(200, integer(10, most=MOST_TRIALS, why=FOR_EVER))


# reading --------------------------------------------------------------------------------------------------------------


def read(kind: type[G], given: Any, above: str = "") -> G:
    """`given`, a mapping of plain values, as settings; groups are mappings inside it.

    above: the dotted key of the mapping, "" for a whole run; every message begins with the key of the setting.

    Raises ConfigError: an unknown or missing setting, or a value that breaks its rule.
    """
    known = {each.name: each for each in fields(kind)}
    if not isinstance(given, Mapping):
        what = f"must be a group of settings: {', '.join(known)}"
        raise refusal(above, shown(given, written), what)
    for name, value in given.items():
        if name not in known:
            key = _below(above, name)
            hint = nearest(key, (_below(above, other) for other in known))
            raise ConfigError(f"{key}={shown(value, written)}: there is no setting '{key}'{hint}")
    values = {}
    for name, each in known.items():
        key = _below(above, name)
        if name in given:
            try:
                values[name] = each.metadata["rule"](key, given[name])
            except checks.Refusal as wrong:
                raise ConfigError(f"{key}={shown(given[name], written)}: {wrong.reason}") from None
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{key}: is missing")
    return kind(**values)


def without_stand_in(plain: dict[str, Any], asked: Iterable[str]) -> dict[str, Any]:
    """The settings, in which nothing may stand in for data that were asked for.

    With `data.fallback=auto` other data take the place of those that cannot be had, unless somebody asked for these:
    who typed `data=mnist` did. asked: the keys given on the command line.
    """
    data = plain.get("data")
    if isinstance(data, dict) and data.get("fallback") == "auto" and {"data", "data._target_"} & set(asked):
        data["fallback"] = None
    return plain


def rules(kind: type[Group], above: str = "") -> Iterator[tuple[str, Rule]]:
    """(dotted key, rule) of every setting, in order: of a group, and then of what is in it."""
    for each in fields(kind):
        key = _below(above, each.name)
        yield key, each.metadata["rule"]
        if "group" in each.metadata:
            yield from rules(each.metadata["group"], key)


def refused(kind: type[Group], key: str, value: Any) -> str:
    """What the rule of the setting `key` has against a value; "" if nothing, or if there is no such setting."""
    rule = dict(rules(kind)).get(key)
    try:
        if rule is not None:
            rule(key, value)
    except checks.Refusal as wrong:
        return wrong.reason
    return ""


def _below(above: str, name: Any) -> str:
    return f"{above}.{name}" if above else str(name)
