"""The settings of a run: their names, their types, and what each of them may be.

`Settings` is what a command works with: plain Python values, whatever they were read from. It is also the schema that
the configuration is composed against (config.py). What a part may be given (a layer, an optimizer, a source of data) is
told by its constructor (parts.py); every other setting has a line in `RULES`, and one without a line does not exist.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from cupynet.errors import ConfigError

Rule = Callable[[Any], "str | None"]  # what is wrong with a value, or None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. conf/config.yaml says what each setting means; a group is a mapping, made by one of its files there."""

    workers: int | None = None
    dtype: str = "float"
    seed: int = 123
    epochs: int = 10
    batch_size: int = 128
    devices: list[int] | None = None
    evaluate_every_epochs: int = 1
    trusted_modules: list[str] = field(default_factory=list)
    backend: dict[str, Any]
    memory: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    parallel: dict[str, Any]
    callbacks: dict[str, Any]


def one_line(text: object) -> str:
    """The text with every run of white space, line breaks included, made one blank."""
    return " ".join(str(text).split())


def listed(names: Iterable[str], last: str = "or") -> str:
    """`half, float or double`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one it is most like, or all of them when none is near."""
    names = sorted(known)
    match = get_close_matches(name, names, n=1) or get_close_matches(name.lower(), names, n=1)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; the names are {listed(names, 'and')}" if 1 < len(names) <= 24 else ""


def written(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def size(value: object, share: bool = False) -> int | float:
    """An amount of memory: bytes as an int, from 2147483648 or "2GiB"; with `share` a part of a device too, from "80%".

    kB MB GB TB are powers of 1000, KiB MiB GiB TiB of 1024. A part is a float, 0 < part <= 1. ValueError otherwise.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b|%|)", str(value).strip(), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value} is not an amount of memory")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not share or not 0 < number <= 100:
            raise ValueError(f"{value} is not a share of the device's memory")
        return number / 100
    amount = int(number * (1024 if "i" in unit else 1000) ** "bkmgt".index(unit[:1] or "b"))
    if amount < 1:
        raise ValueError(f"{value} is no memory at all")
    return amount


def _whole(minimum: int | None, null: str = "", other: str = "") -> Rule:
    """A whole number from `minimum` on; or null, which means `null`."""
    least = "" if minimum is None else f"at least {minimum}"
    tail = (f", or null for {null}" if null else "") + other

    def rule(value: Any) -> str | None:
        if null and value is None:
            return None
        if type(value) is not int:
            return f"must be a whole number{f', {least}' if least else ''}{tail}"
        return f"must be {least}{tail}" if minimum is not None and value < minimum else None

    return rule


def _one_of(*names: str) -> Rule:
    def rule(value: Any) -> str | None:
        return None if value in names else f"must be {listed(names)}{_guess(value, names)}"

    return rule


def _guess(value: Any, names: Iterable[str]) -> str:
    match = get_close_matches(str(value).lower(), list(names), n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _dtype(value: Any) -> str | None:
    names = ("half", "float", "double")
    same = {"float16": "half", "fp16": "half", "float32": "float", "fp32": "float", "float64": "double"}.get(str(value))
    return f"must be {listed(names)}; {value} is '{same}' here" if same else _one_of(*names)(value)


def _switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _seconds(value: Any) -> str | None:
    number = type(value) in (int, float)
    # no thread can wait longer than TIMEOUT_MAX; infinity and nan fail the comparison too
    return None if number and 0 < value <= threading.TIMEOUT_MAX else "must be a number of seconds above 0"


def _memory(share: bool) -> Rule:
    def rule(value: Any) -> str | None:
        try:
            return None if value is None else (size(value, share), None)[1]
        except ValueError:
            return f"must be bytes, an amount such as 2GiB{', a share of the device such as 80%' * share}, or null"

    return rule


def _frequency(value: Any) -> str | None:
    if value in ("epoch", "end") or (type(value) is int and value >= 1):
        return None
    return f"must be a whole number of iterations, at least 1, or epoch, or end{_guess(value, ('epoch', 'end'))}"


def _devices(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(number) is not int or number < 0 for number in value):
        return "must be a list of device numbers such as [0,2], or null for all"
    return None if len(set(value)) == len(value) else "names a device twice"


def _modules(value: Any) -> str | None:
    named = isinstance(value, list) and all(
        isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in value
    )
    return None if named else "must be a list of Python modules such as [mynet,mynet.layers]"


RULES: dict[str, Rule] = {
    "workers": _whole(1, null="one per device"),
    "dtype": _dtype,
    "seed": _whole(0),
    "epochs": _whole(1),
    "batch_size": _whole(1),
    "devices": _devices,
    "evaluate_every_epochs": _whole(1),
    "trusted_modules": _modules,
    "backend.name": _one_of("auto", "numpy", "numba", "cupy"),
    "backend.priority.gpu": _whole(None, other="; by default it is BACKEND_PRIORITY_GPU of the environment"),
    "backend.priority.cpu": _whole(None, other="; by default it is BACKEND_PRIORITY_CPU of the environment"),
    "memory.device_pool_limit": _memory(share=True),
    "memory.device_pool_trim_above": _memory(share=False),
    "memory.pinned_pool_trim_above": _whole(0, null="never"),
    "parallel.averaging_frequency": _frequency,
    "parallel.prefetch_buffer": _whole(0),
    "parallel.report_score_after_averaging": _switch,
    "parallel.average_updaters": _switch,
    "parallel.timeout_s": _seconds,
    "callbacks.history.every_iterations": _whole(1),
    "callbacks.progress": _one_of("auto", "bar", "lines", "none"),
}


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """The settings of `cupynet.bench`: those of the run it measures, and what conf/bench.yaml adds."""

    peers: str | None = None
    repeats: int = 5
    images: int = 60000


BENCH_RULES: dict[str, Rule] = {
    "peers": lambda value: None if value in (None, "torch") else "must be torch, or null for none",
    "repeats": _whole(1),
    "images": _whole(1),
}


def rules(schema: type[Settings]) -> dict[str, Rule]:
    """The rules of a command's settings."""
    return {**RULES, **BENCH_RULES} if issubclass(schema, BenchSettings) else RULES


def validate(settings: Settings) -> None:
    """Hold every setting that is not a part's against its rule; ConfigError names the first that breaks one."""
    known = rules(type(settings))
    ruled_groups = {key.partition(".")[0] for key in known if "." in key}
    found: dict[str, Any] = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name in ruled_groups:
            found.update(_leaves(value, each.name))
        elif each.name in known:
            found[each.name] = value
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{key}={written(value)}: there is no setting '{key}'{nearest(key, _siblings(key))}")
        wrong = known[key](value)
        if wrong:
            raise ConfigError(f"{key}={one_line(written(value))}: {wrong}")
    for key in known:
        if key not in found:
            raise ConfigError(f"{key}: is missing")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a mapping that is not itself a mapping above a ruled key."""
    if isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in RULES):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    else:
        yield key, value


def _siblings(key: str) -> list[str]:
    group = key.partition(".")[0]
    return [known for known in RULES if known.startswith(f"{group}.")]
