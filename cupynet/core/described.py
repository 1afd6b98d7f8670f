"""Objects that keep the arguments they were made with, and their description as plain values."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown


class Described:
    """Base class of parts that can be described: keeps the arguments of the constructor, unless it is a dataclass."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            cls.__init__ = _keeping(cls.__init__)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Return the call that makes an equal object."""
        positional, named = self._arguments
        if is_dataclass(self):
            named = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
            named = {name: value for name, value in named.items() if value != _defaults(self)[name]}
        cells = [*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())]
        return f"{type(self).__name__}({', '.join(cells)})"


def _defaults(part: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(part)}


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor: keep its arguments. The first of several constructors that are called counts."""

    @functools.wraps(init)
    def keeping(self: Described, *positional: Any, **named: Any) -> None:
        if "_arguments" not in vars(self):
            self._arguments = positional, named
        init(self, *positional, **named)

    return keeping


def describe(part: Any) -> Any:
    """Return a part as plain values, from which `cupynet.config.instantiate.build` makes an equal one.

    A part becomes a mapping of its arguments, and its class as `_target_`.

    Raises:
        ConfigError: an argument is neither a part nor a plain value.
    """
    if isinstance(part, Described):
        return {"_target_": _target(type(part)), **{name: describe(value) for name, value in _given(part).items()}}
    if isinstance(part, Mapping):
        return {str(name): describe(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [describe(value) for value in part]
    plain = part.item() if getattr(part, "ndim", None) == 0 else part  # a number of NumPy
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise ConfigError(f"{shown(part)} cannot be described by numbers, names, lists and parts of cupynet")


def _given(part: Described) -> dict[str, Any]:
    """Return the arguments of a part by name."""
    if is_dataclass(part):
        return {each.name: getattr(part, each.name) for each in fields(part) if each.init}
    positional, named = part._arguments
    bound = inspect.signature(type(part)).bind(*positional, **named)
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _target(cls: type) -> str:
    """Return the name of a class: in its package for classes of cupynet, which is more stable, else in its module."""
    package = ".".join(cls.__module__.split(".")[:2])
    if package.startswith("cupynet.") and getattr(sys.modules.get(package), cls.__name__, None) is cls:
        return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
