"""Argument validation. Validators return the value as a plain Python type, or raise ConfigError.

The message names the argument and its value: `Conv2D filters=0: must be an integer of at least 1`. NumPy scalars are
accepted as numbers; bools are not.
"""

from __future__ import annotations

import copy
import math
import operator
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from cupynet.core.errors import ConfigError
from cupynet.core.wording import guess, one, shown

T = TypeVar("T")
LONGEST = 1 << 63  # integers must fit into 64 bits


def integer(
    name: str, value: Any, minimum: int | None = None, also: str = "", *, most: int = LONGEST - 1, why: str = ""
) -> int:
    """Return `value` as an int of at least `minimum` and at most `most`.

    also: text appended to the message, such as ", or null". why: reason for the maximum.
    """
    try:
        number = None if is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < (-LONGEST if minimum is None else minimum):
        least = "" if minimum is None else f" of at least {minimum}"
        raise ConfigError(f"must be an integer{least}{also}", name, shown(value))
    if number > most:
        raise ConfigError(f"must be at most {most}{also}{why and f': {why}'}", name, shown(value))
    return number


def seed(name: str, value: Any) -> int:
    """Return `value` as an unsigned 64-bit integer, which seeds a Philox generator."""
    return integer(name, value, 0, most=(1 << 64) - 1)


def pair(name: str, value: Any, minimum: int | None = None, also: str = "") -> tuple[int, int]:
    """Return `value` as (height, width), each at least `minimum`. value: one integer for both, or a sequence of two."""
    height, width = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
    also = f", or a pair of them (height, width){also}"
    return integer(name, height, minimum, also), integer(name, width, minimum, also)


def number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None, below: float = math.inf,
    unit: str = "", also: str = "",
) -> float:  # fmt: skip
    """Return `value` as a finite float greater than `above`, at least `minimum` and less than `below`.

    unit: follows "number of" in the message.
    """
    try:
        result = math.nan if is_bool(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    too_low = (above is not None and result <= above) or (minimum is not None and result < minimum)
    if not math.isfinite(result) or too_low or result >= below:
        bounds = {"above": above, "of at least": minimum, "below": below if below < math.inf else None}
        limits = " and ".join(f"{relation} {bound:g}" for relation, bound in bounds.items() if bound is not None)
        description = f"number of {unit} {limits}" if unit else f"number {limits}"
        raise ConfigError(f"must be a {description.rstrip()}{also}", name, shown(value))
    return result


def flag(name: str, value: Any) -> bool:
    if not is_bool(value):
        raise ConfigError("must be true or false", name, shown(value))
    return bool(value)


def one_of(
    name: str, value: Any, names: Iterable[str], also: str = "", *, elsewhere: Mapping[str, str] | None = None
) -> str:
    """Return `value` if it is one of `names`.

    also: text appended to the message, such as ", or a number". elsewhere: names in Keras or PyTorch -> names here.
    """
    known, text = list(names), shown(value, str)
    if elsewhere and text in elsewhere:
        raise ConfigError(f"is called {elsewhere[text]} here", name, text)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"must be one of {', '.join(known)}{also}{guess(value, known)}", name, text)
    return value


def instance(name: str, value: Any, kind: type[T], example: str) -> T:
    """Return `value` if it is an instance of `kind`. example: a valid value, for the message."""
    if isinstance(value, kind):
        return value
    actual = f"the class {value.__name__}" if isinstance(value, type) else one(type(value).__name__)
    raise ConfigError(
        f"must be {one(kind.__name__)}, such as {example}", name, "None" if value is None else f"<{actual}>"
    )


def object_named(
    name: str, value: Any, classes: Mapping[str, type[T]], kind: type[T], example: str, *,
    elsewhere: Mapping[str, str] | None = None,
) -> T:  # fmt: skip
    """Return `value` if it is an instance of `kind`. Given a name in `classes`, create one with default arguments."""
    if isinstance(value, str):
        return classes[one_of(name, value, classes, elsewhere=elsewhere)]()
    return instance(name, value, kind, example)


def without_prefix(monitor: str, figures: Collection[str]) -> str:
    """Strip the prefix `validation_` or `val_` (as in Keras) from `monitor` if `figures` contains the rest."""
    figure = re.sub("^(validation|val)_", "", monitor)
    return figure if figure in figures else monitor


def mode_of(monitor: str) -> str:
    """Return `min` for names that contain "loss" or "error", otherwise `max`."""
    return "min" if re.search("loss|error", monitor) else "max"


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite int or float (not a bool), otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def is_bool(value: Any) -> bool:
    """Return True for a Python or NumPy bool."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def copied(name: str, part: T) -> T:
    """Return a deep copy of an object for a worker, because workers may not share anything that it stores."""
    try:
        return copy.deepcopy(part)
    except TypeError as error:
        reason = f"{type(part).__name__} must support copy.deepcopy, because every worker has a copy ({error})"
        raise ConfigError(reason, name) from error
