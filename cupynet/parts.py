"""Parts: objects named in the configuration by `_target_` and built from the settings beside it.

The constructor's signature is the schema of a part. Only classes are built, and only those *defined* in a trusted
module: that cannot be borrowed, as a dotted path can (`cupynet.train.os.mkdir` begins with cupynet too).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import Parameter
from types import ModuleType
from typing import Any, TypeVar

from cupynet.checks import listed, nearest, one_line, shown, written
from cupynet.errors import ConfigError

T = TypeVar("T")


def build_as(kind: type[T], node: Any, key: str, trusted_modules: Iterable[str] = ()) -> T:
    """What `build` makes of a node, which must be a `kind`; else a ConfigError that says what to write."""
    part = build(node, key, trusted_modules)
    if not isinstance(part, kind):
        # a value is shown as it was written; what was built from a _target_ is named by its class
        place = key if isinstance(node, Mapping) else f"{key}={shown(node, written)}"
        raise ConfigError(f"{place}: must be a {kind.__name__}, got {type(part).__name__}: give it a _target_")
    return part


def build(node: Any, key: str, trusted_modules: Iterable[str] = ()) -> Any:
    """Make what a piece of the configuration stands for, parts inside parts included.

    node: plain values; a mapping with `_target_: "cupynet.nn.Conv2D"` becomes an object of that class, any other
    mapping or list is built item by item, in order, and what else there is is returned as it is.
    key: where the node stands in the configuration ("model"), which every message begins with.
    trusted_modules: modules besides cupynet whose classes may be built, with all that lies in them.

    Raises ConfigError: an untrusted or unknown class, an argument that the constructor does not have or lacks, and what
    the constructor itself refuses (ConfigError, TypeError or ValueError).
    """
    trusted = tuple(trusted_modules)
    if isinstance(node, Mapping):
        items = {name: item for name, item in node.items() if name != "_target_"}
        if "_target_" not in node:
            return {name: build(item, f"{key}.{name}", trusted) for name, item in items.items()}
        cls = _find(node["_target_"], key, ("cupynet", *trusted))
        _fit(cls, items, key)
        arguments = {name: build(item, f"{key}.{name}", trusted) for name, item in items.items()}
        try:
            return cls(**arguments)
        except (ConfigError, TypeError, ValueError) as error:
            text = one_line(error)
            raise ConfigError(text if text.startswith((f"{key}:", f"{key}.")) else f"{key}: {text}") from error
    if isinstance(node, list | tuple):
        return [build(item, f"{key}[{index}]", trusted) for index, item in enumerate(node)]
    return node


def only_asked(plain: dict[str, Any], overrides: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The settings with each part whose class was chosen by an override left with the arguments of overrides alone.

    `optimizer._target_=mine.Adam optimizer.beta=0.9`: what the file of the group gave its own class is none of Adam's.
    The same for `optimizer={_target_: mine.Adam, beta: 0.9}`.

    overrides: (dotted key, value) of each.
    """
    asked: set[str] = set()
    for key, value in overrides:
        asked.add(key)
        if isinstance(value, Mapping):
            asked.update(f"{key}.{name}" for name in value)
    for key in asked:
        place, _, last = key.rpartition(".")
        part: Any = plain
        for name in place.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if last == "_target_" and isinstance(part, dict):
            kept = {other[len(place) + 1 :].split(".")[0] for other in asked if other.startswith(f"{place}.")}
            for name in part.keys() - kept:
                del part[name]
    return plain


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a dotted name is one of the modules or lies in one: cupynet.nn lies in cupynet, cupynetx does not."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _find(target: Any, key: str, trusted: tuple[str, ...]) -> type:
    """The class that `_target_` names, if it is trusted."""
    where = f"{key}._target_={one_line(target)}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise ConfigError(f"{where}: must be a class with its module, such as cupynet.nn.Conv2D")
    if not _lies_in(target, trusted):  # nothing outside is even imported
        mine = f"list '{target.partition('.')[0]}' in trusted_modules if it is yours"
        raise ConfigError(f"{where}: only classes of {listed(trusted, 'and')} are built; {mine}")
    module_name, _, name = target.rpartition(".")
    module = _import(module_name, where)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [other for other in dir(module) if other[0].isupper()]
        raise ConfigError(f"{where}: there is no class '{name}' in {module_name}{nearest(name, classes)}")
    if not _lies_in(found.__module__, trusted):
        raise ConfigError(f"{where}: is a class of {found.__module__}, which is not trusted")
    return found


def _import(name: str, where: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if _lies_in(name, [missing]):
            raise ConfigError(f"{where}: there is no module '{name}'") from error
        raise ConfigError(f"{where}: {name} needs '{missing}', which is not installed") from error


def _fit(cls: type, arguments: Mapping[Any, Any], key: str) -> None:
    """Hold the arguments against the constructor's signature."""
    parameters = inspect.signature(cls).parameters
    named = {
        name: each
        for name, each in parameters.items()
        if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    for name in arguments:
        if name not in named and not takes_any:
            raise ConfigError(f"{key}.{name}: {cls.__name__} has no argument '{name}'{nearest(str(name), named)}")
    for name, each in named.items():
        if each.default is Parameter.empty and name not in arguments:
            raise ConfigError(f"{key}.{name}: is missing: {cls.__name__} needs it")
