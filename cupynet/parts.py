"""Parts: objects named in the configuration by `_target_` and built from the settings beside it.

The constructor's signature is the schema of a part. Only classes are built, and only those *defined* in a trusted
module: a definition cannot be borrowed, as a dotted path can (`cupynet.train.os.mkdir` begins with cupynet too).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import Parameter
from types import ModuleType
from typing import Any, TypeVar

from cupynet.checks import listed, nearest, one, one_line, shown, written
from cupynet.errors import ConfigError

T = TypeVar("T")


ABSTRACT = ("Layer", "Loss", "Optimizer", "Synchronizer")  # classes of cupynet that do nothing by themselves


def build_as(kind: type[T], node: Any, key: str, trusted_modules: Iterable[str] = ()) -> T:
    """What `build` makes of a node, which must be a `kind`; else a ConfigError that says what to write."""
    part = build(node, key, trusted_modules)
    if isinstance(part, kind) and not (type(part) is kind and kind.__name__ in ABSTRACT):
        return part
    needed = f"must be {one(kind.__name__)}"
    if isinstance(node, Mapping) and "_target_" in node:
        whole = f"{node['_target_']} is " + ("what all of them are made from" if isinstance(part, kind) else "none")
        raise ConfigError(f"{key}._target_: {needed}, and {whole}: name another class")
    # a value is shown as it was written; a mapping by its type
    place = key if isinstance(node, Mapping) else f"{key}={shown(node, written)}"
    raise ConfigError(f"{place}: {needed}, got {type(part).__name__}: give it a _target_")


def build(node: Any, key: str, trusted_modules: Iterable[str] = ()) -> Any:
    """Make what a piece of the configuration stands for, parts inside parts included.

    node: plain values; a mapping with `_target_: "cupynet.nn.Conv2D"` becomes an object of that class, any other
    mapping or list is built item by item, in order, and everything else is returned as it is.
    key: where the node stands in the configuration ("model"), which every message begins with.
    trusted_modules: modules besides cupynet whose classes may be built, with all that lies in them.

    Raises ConfigError: an untrusted or unknown class, an argument that the constructor does not take, one that it
    needs and is not given, and what the constructor itself refuses (ConfigError, TypeError or ValueError).
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
            raise ConfigError(under(key, items, error)) from error
    if isinstance(node, list | tuple):
        return [build(item, f"{key}[{index}]", trusted) for index, item in enumerate(node)]
    return node


def under(key: str, node: Any, error: BaseException) -> str:
    """What a part has against its arguments, in one line that begins with the setting.

    Under `data` the text `limit=True: must be ...` becomes `data.limit=true: must be ...`, see `named`; what is about
    no single argument comes behind the key.
    """
    text = one_line(error)
    if text.startswith((f"{key}:", f"{key}.", f"{key}=")):
        return text
    return named(key, node, text) or f"{key}: {text}"


def named(key: str, node: Any, text: str) -> str | None:
    """The text of an error, of whose beginning is made the setting as it is typed; None where it names none of `node`.

    node: what was given, by name: `Conv2D kernel='x': ...` names `kernel`, if that is what it is; and
    `layer 'pool1' is ...` what is called so among the values of one that is given.
    """
    if not isinstance(node, Mapping):
        return None
    about = re.match(r"(?:[A-Z]\w* )?(\w+)=", text)
    if about is not None and about[1] in node:
        value = node[about[1]]
        for way in (repr, str, written):
            begins = f"{about[0]}{shown(value, way)}: "
            if text.startswith(begins):
                return f"{key}.{about[1]}={shown(value, written)}: {text[len(begins) :]}"
    about = re.match(r"\w+ '(\w+)' is [^:]*: ", text)
    for name, values in node.items():
        if about is not None and isinstance(values, Mapping) and about[1] in values:
            place, value = f"{key}.{name}.{about[1]}", values[about[1]]
            if not isinstance(value, Mapping) or "_target_" not in value:
                way_out = f"; ~{place} takes it out" if value is None else ""
                return f"{place}={shown(value, written)}: {text[about.end() :]}{way_out}"
    return None


def for_chosen_classes(plain: dict[str, Any], overrides: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The settings, in which each part whose class was chosen by an override keeps only the arguments meant for it.

    Those are what overrides give, and of the file's own arguments those that the class takes too: after
    `optimizer._target_=cupynet.optim.SGD`, or `optimizer={_target_: cupynet.optim.SGD}`, the file's learning_rate
    still counts, its momentum does not.

    overrides: (dotted key, value) of each.
    """
    asked: set[str] = set()
    for key, value in overrides:
        asked.add(key)
        if isinstance(value, Mapping):
            asked.update(f"{key}.{name}" for name in value)
    trusted = plain.get("trusted_modules") or ()
    for key in asked:
        place, _, last = key.rpartition(".")
        part: Any = plain
        for name in place.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if last != "_target_" or not isinstance(part, dict):
            continue
        try:
            taken, takes_any = arguments(_find(part[last], place, ("cupynet", *trusted)))
        except ConfigError:  # told when the part is built
            continue
        kept = {other[len(place) + 1 :].split(".")[0] for other in asked if other.startswith(f"{place}.")}
        for name in part.keys() - kept - taken.keys() if not takes_any else ():
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
        inside = vars(module)  # a name that is not in it is resolved when it is asked for
        classes = [
            other for other in dir(module) if other[0].isupper() and _is_built(inside.get(other, object), trusted)
        ]
        raise ConfigError(f"{where}: there is no class '{name}' in {module_name}{nearest(name, classes)}")
    if not _lies_in(found.__module__, trusted):
        raise ConfigError(f"{where}: is a class of {found.__module__}, which is not trusted")
    return found


def _is_built(found: Any, trusted: Iterable[str]) -> bool:
    """Whether this is a class that a part may be, or stands for one (`object`)."""
    own = isinstance(found, type) and _lies_in(found.__module__, trusted) and not issubclass(found, BaseException)
    return own or found is object


def _import(name: str, where: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if _lies_in(name, [missing]):
            raise ConfigError(f"{where}: there is no module '{name}'") from error
        raise ConfigError(f"{where}: {name} needs '{missing}', which is not installed") from error


def arguments(cls: type) -> tuple[dict[str, Parameter], bool]:
    """What the constructor takes by name, and whether it takes any name."""
    parameters = inspect.signature(cls).parameters
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = {name: each for name, each in parameters.items() if each.kind in by_name}
    return named, any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def _fit(cls: type, given: Mapping[Any, Any], key: str) -> None:
    """Check the given arguments against the constructor's signature."""
    named, takes_any = arguments(cls)
    for name in given:
        if name not in named and not takes_any:
            raise ConfigError(f"{key}.{name}: {cls.__name__} has no argument '{name}'{nearest(str(name), named)}")
    for name, each in named.items():
        if each.default is Parameter.empty and name not in given:
            raise ConfigError(f"{key}.{name}: is missing: {cls.__name__} needs it")
