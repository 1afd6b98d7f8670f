"""Descriptions of objects as plain values: their class and constructor arguments."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter
from numbers import Number
from typing import Any

from cupynet.core.errors import ConfigError
from cupynet.core.wording import nearest, shown

PLAIN = bool | int | float | str | None


class Described:
    """Base class of objects that `describe` supports. Stores the constructor arguments, except in dataclasses."""

    _call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    _made: Mapping[str, Any] = {}  # plain attributes after construction

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            cls.__init__ = _keeping(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Return the call that creates an equal object."""
        positional, named = self._call
        if is_dataclass(self) and "_call" not in vars(self):  # a subclass may have its own constructor
            defaults = {item.name: item.default for item in fields(self) if item.init}
            named = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        cells = [*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())]
        return f"{type(self).__name__}({', '.join(cells)})"


def stable(value: object) -> str:
    """Return `repr(value)` without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor to store its arguments. Of nested `super().__init__` calls, only the outermost stores them."""
    parameters = inspect.signature(init).parameters
    known = [*parameters][1:]
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(init)
    def keeping(self: Described, *positional: Any, **named: Any) -> None:
        outermost = "_call" not in vars(self)
        if outermost:
            if not takes_any and (unknown := next((name for name in named if name not in known), None)):
                reason = f"got an unexpected keyword argument '{unknown}'{nearest(unknown, known)}"
                raise TypeError(f"{type(self).__name__}() {reason}")
            self._call = _copied(positional), _copied(named)
        init(self, *positional, **named)
        if outermost:
            self._made = {name: value for name, value in vars(self).items() if isinstance(value, PLAIN)}

    return keeping


def _copied(value: Any) -> Any:
    """Copy nested lists and mappings, but not the objects in them."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def describe(part: Any) -> Any:
    """Return plain values from which `cupynet.config.instantiate.build` can create an equal object.

    A `Described` object becomes a mapping of its arguments, with the class as `_target_`.

    Raises:
        ConfigError: an argument cannot be described, an attribute was changed after construction, or a class cannot be
            imported.
    """
    if isinstance(part, Described):
        return {"_target_": _target(type(part)), **{name: describe(value) for name, value in _arguments(part).items()}}
    if hasattr(part, "tolist") and not isinstance(part, type):  # NumPy scalars and arrays
        part = part.tolist()
    if isinstance(part, Mapping):
        return {str(name): describe(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [describe(value) for value in part]
    if isinstance(part, PLAIN):
        return part
    raise ConfigError(
        f"{shown(part)} cannot be saved. Use numbers, strings, lists, mappings and instances of cupynet classes"
    )


def check_unchanged(part: Described, name: str) -> None:
    """Raise ConfigError if an attribute named after a constructor argument was changed."""
    for argument in part._made.keys() & inspect.signature(type(part)).parameters:
        value, original = getattr(part, argument, None), part._made[argument]
        if isinstance(value, PLAIN | Number) and value is not original and value != original:  # NaN differs from itself
            reason = "was changed after construction, but copies and saved files keep the original value"
            remedy = f"Set it back to {original!r}, or create a new {type(part).__name__}"
            raise ConfigError(f"{reason}. {remedy}", f"{name}.{argument}".lstrip("."), shown(value))


def _arguments(part: Described) -> dict[str, Any]:
    """Return the constructor arguments by name. Raise ConfigError if they no longer describe the object."""
    kind = type(part).__name__
    check_unchanged(part, kind)
    if is_dataclass(part) and "_call" not in vars(part):
        return {item.name: getattr(part, item.name) for item in fields(part) if item.init}
    positional, named = part._call
    signature = inspect.signature(type(part))
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*positional, **named).arguments.items():
        parameter_kind = signature.parameters[name].kind
        if parameter_kind is Parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"{kind} cannot be saved, because its constructor takes any number of positional arguments (*{name})"
            )
        arguments |= value if parameter_kind is Parameter.VAR_KEYWORD else {name: value}
    return arguments


def _target(cls: type) -> str:
    """Return the import path of a class. Classes of cupynet are named by package, because modules may change."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls.__name__} cannot be saved. Define it in an importable module")
    package = ".".join(cls.__module__.split(".")[:2])
    if package.startswith("cupynet.") and getattr(sys.modules.get(package), cls.__name__, None) is cls:
        return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
