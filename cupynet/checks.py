"""What arguments may be, checked in one place: every check returns the value in its plain type or raises a ConfigError.

A message names the value, what it must be and, where there is one, the other way out:
`Conv2D filters=0: must be an integer of at least 1`. NumPy's scalars are taken like Python's; a bool is no number.
A refusal carries its reason alone too, for whoever writes the value in another way: the command line says
`filters=zero` where Python says `filters='zero'`. Below the checks stands what messages are made of.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from cupynet.errors import ConfigError

T = TypeVar("T")

DTYPES = ("half", "float", "double")  # the names of the precisions, and of the backends: here because settings are read
BACKENDS = ("numpy", "numba", "cupy")  # without NumPy, which every file of cupynet.backend imports


class Refusal(ConfigError):
    """What a check raises: its text is `name=value: reason`, and `reason` stands alone too."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


def refusal(name: str, value: str, reason: str) -> Refusal:
    """The error about a value, written as it is to be shown."""
    return Refusal(f"{name}={value}: {reason}", reason)


def integer(
    name: str, value: Any, minimum: int | None = None, also: str = "", *,
    below: int | None = None, most: int | None = None, why: str = "",
) -> int:  # fmt: skip
    """`value` as an int of at least `minimum`, smaller than `below` and at most `most`, of which `why` says the reason.

    `also` ends the message (", or null").
    """
    try:
        number = None if is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum) or (below is not None and number >= below):
        least = "" if minimum is None else f" of at least {minimum}"
        bound = "" if below is None else f"{' and' if least else ''} below {power(below)}"
        raise refusal(name, repr(value), f"must be an integer{least}{bound}{also}")
    if most is not None and number > most:
        raise refusal(name, repr(value), f"must be at most {most}{also}{why and f': {why}'}")
    return number


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
        raise refusal(name, repr(value), f"must be a {what} {' and '.join(bounds)}".rstrip() + also)
    return real


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, if it is one."""
    if not is_bool(value):
        raise refusal(name, repr(value), "must be true or false")
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str], also: str = "") -> str:
    """`value` if it is one of `names`; `also` stands behind them (", or null")."""
    known = list(names)
    if not isinstance(value, str) or value not in known:
        reason = f"must be one of {', '.join(known)}" if len(known) > 1 else f"must be {known[0]}"
        raise refusal(name, value, f"{reason}{also}{guess(value, known) if len(known) > 1 else ''}")
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


def power(bound: int) -> str:
    """A bound as one writes it: 2**64 for the power of two that it is, 100 for 100."""
    return f"2**{bound.bit_length() - 1}" if bound >= 1 << 32 and bound & (bound - 1) == 0 else str(bound)


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
