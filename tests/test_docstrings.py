"""Docstrings say what somebody who calls needs: every argument by its name, arrays with their shapes, times in seconds.

Looked at are the names of `cupynet.__all__`: classes with their public methods, and functions. What a method overrides
may say it for it, and a class may for its methods; what a class takes over from a base class of ours is said there.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

import cupynet

NAMES = sorted(cupynet.__all__)
CLASSES = [name for name in NAMES if inspect.isclass(getattr(cupynet, name))]
# (N, H, W, C), (P,), (N, ...), (3, V), 0-d, of any shape: what an array is said to be
SHAPE = re.compile(r"\(\w+,\)|\([\w.]+(, [\w.*]+)+\)|\b0-d\b|\bany shape\b")
ARRAY = re.compile(r"\b(Array|NDArray|ndarray)\b")
TIMES = re.compile(r"(^|_)(seconds|timeout|duration|delay|interval|ms|millis|minutes)$")


def ours(cls: type) -> list[type]:
    """A class of ours with what it is made of, but for what is not ours."""
    return [each for each in cls.__mro__ if each.__module__.startswith("cupynet")]


def said_of(thing: Any) -> str:
    """All that is said of a class, its bases among them, or of a function."""
    if not inspect.isclass(thing):
        return inspect.getdoc(thing) or ""
    return "\n".join(f"{each.__doc__ or ''}\n{each.__init__.__doc__ or ''}" for each in ours(thing))  # type: ignore[misc]


def signature(thing: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(thing).parameters.values())
    return [each for each in parameters if each.name != "self" and not each.name.startswith("_")]


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods, properties and class methods of a class, those that it takes over from ours too."""
    seen = set()
    for base in ours(cls):
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield name, function


def said_of_method(cls: type, name: str) -> str:
    """What is said of a method where it is defined, or in a class that it overrides."""
    found = []
    for base in ours(cls):
        value = vars(base).get(name)
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        found.append(getattr(function, "__doc__", None) or "")
    return "\n".join(found)


def mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_and_method_says_what_it_is(name: str) -> None:
    thing = getattr(cupynet, name)
    said = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert said and said.strip(), name  # its own: a class has that of its base otherwise
    assert not thing.__doc__.startswith(f"{name}("), f"{name}: this is what dataclasses say of themselves"
    if inspect.isclass(thing):
        silent = [method for method, _ in methods(thing) if not said_of_method(thing, method).strip()]
        assert not silent, f"{name}: {', '.join(silent)}"


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_said_by_its_name(name: str) -> None:
    thing = getattr(cupynet, name)
    if inspect.isclass(thing) and issubclass(thing, BaseException | Enum):
        return
    text = said_of(thing)
    silent = [each.name for each in signature(thing) if not mentions(text, each.name)]
    assert not silent, f"{name}: {', '.join(silent)}"


def arrays(function: Callable[..., Any]) -> Iterator[str]:
    """Which arguments of a function are arrays, and `return` where it returns one."""
    for name, annotation in getattr(function, "__annotations__", {}).items():
        if ARRAY.search(str(annotation)):
            yield name


def shapes(function: Callable[..., Any]) -> bool:
    """Whether a comment in the function says a shape."""
    source = textwrap.dedent(inspect.getsource(function))
    return any(SHAPE.search(comment) for comment in re.findall(r"#.*$", source, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_shapes(name: str) -> None:
    thing = getattr(cupynet, name)
    silent = []
    if inspect.isclass(thing):
        if list(arrays(thing)) and not SHAPE.search(thing.__doc__ or ""):
            silent.append(name)
        for method, function in methods(thing):
            if vars(thing).get(method) is None and any(base.__name__ in NAMES for base in ours(thing)[1:]):
                continue  # told of where it is defined
            said = said_of_method(thing, method)
            if list(arrays(function)) and not SHAPE.search(said) and not shapes(function):
                silent.append(f"{name}.{method}({', '.join(arrays(function))})")
    elif list(arrays(thing)) and not SHAPE.search(said_of(thing)):
        silent.append(name)
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("name", NAMES)
def test_times_are_in_seconds_and_say_so(name: str) -> None:
    thing = getattr(cupynet, name)
    callables = [(said_of(thing), thing)]
    if inspect.isclass(thing):
        callables += [(said_of_method(thing, method) + said_of(thing), function) for method, function in methods(thing)]
    for text, function in callables:
        try:
            names = [each.name for each in signature(function)]
        except ValueError:
            continue
        for each in names:
            assert not TIMES.search(each), f"{name}: {each} is a time: it ends in _s"
            if each.endswith("_s"):
                assert re.search(r"\bseconds?\b", text), f"{name}: {each} is in seconds, which nobody says"
