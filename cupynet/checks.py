"""What arguments may be, checked in one place: every check returns the value in its plain type or raises a ConfigError.

A message names the value, what it must be and, where there is one, the other way out:
`Conv2D filters=0: must be an integer of at least 1`. NumPy's scalars are taken like Python's; a bool is no number.
Below the checks stands what messages are made of.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from cupynet.errors import ConfigError

T = TypeVar("T")


def integer(name: str, value: Any, minimum: int | None = None, also: str = "", *, below: int | None = None) -> int:
    """`value` as an int of at least `minimum`, and smaller than `below`; `also` ends the message (", or null")."""
    try:
        number = None if is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum) or (below is not None and number >= below):
        least = "" if minimum is None else f" of at least {minimum}"
        most = "" if below is None else f"{' and' if least else ''} below {below}"
        raise ConfigError(f"{name}={value!r}: must be an integer{least}{most}{also}")
    return number


def pair(name: str, value: Any, minimum: int | None = None, also: str = "") -> tuple[int, int]:
    """`value` as ints (height, width), each of at least `minimum`: a number for both, or a list or tuple of two."""
    both = tuple(value) if isinstance(value, list | tuple) else (value, value)
    try:
        height, width = (integer(name, each, minimum) for each in both)
    except ValueError as error:
        least = "" if minimum is None else f" of at least {minimum}"
        raise ConfigError(
            f"{name}={value!r}: must be an integer{least}, or a pair of them (height, width){also}"
        ) from error
    return height, width


def number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None, below: float = math.inf,
    unit: str = "", also: str = "",
) -> float:  # fmt: skip
    """`value` as a float that is above `above` or at least `minimum`, and smaller than `below`; NaN is refused."""
    try:
        real = math.nan if is_bool(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        real = math.nan
    fits = (above is None or real > above) and (minimum is None or real >= minimum) and real < below
    if not fits:
        bounds = (
            [f"above {above:g}"] if above is not None else [f"of at least {minimum:g}"] if minimum is not None else []
        )
        bounds += [f"below {below:g}"] if below < math.inf else []
        what = f"number of {unit}" if unit else "number"
        raise ConfigError(f"{name}={value!r}: must be a {what} {' and '.join(bounds)}".rstrip() + also)
    return real


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, if it is one."""
    if not is_bool(value):
        raise ConfigError(f"{name}={value!r}: must be true or false")
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str]) -> str:
    """`value` if it is one of `names`."""
    known = list(names)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name}={value}: must be one of {', '.join(known)}{guess(value, known)}")
    return value


def instance(name: str, value: Any, kind: type[T], example: str) -> T:
    """`value` if it is a `kind`; a class where an object is needed is said to be one. `example`: what to write."""
    if isinstance(value, kind):
        return value
    own = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise ConfigError(f"{name} is {own}: must be a {kind.__name__}, such as {example}")


def is_bool(value: Any) -> bool:
    """Whether `value` is a bool of Python or NumPy."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


# wording --------------------------------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """The text with every run of white space, line breaks included, made one blank."""
    return " ".join(str(text).split())


def listed(names: Iterable[str], last: str = "or") -> str:
    """`half, float or double`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def guess(value: object, names: Iterable[str]) -> str:
    """The end of a message about a value that is none of `names`: the one it is most like, if any is near."""
    match = get_close_matches(str(value).lower(), list(names), n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


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
