"""Validation of arguments, and wording of messages. A check returns the value in its plain type or raises ConfigError.

A message names the argument, its value and what it must be: `Conv2D filters=0: must be an integer of at least 1`.
NumPy's scalars are accepted like Python's; a bool is not a number.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from cupynet.core.errors import ConfigError

T = TypeVar("T")
SHOWN = 80  # characters of a value in a message
LONGEST = 1 << 63  # integers must fit into 64 bits, as in arrays and files

# Names are listed here because settings are read without NumPy, which every file of cupynet.backend imports.
DTYPES = ("half", "bfloat16", "float", "double")
DTYPE_ALIASES = {"float16": "half", "float32": "float", "float64": "double"}  # NumPy's names are taken too
BACKENDS = ("numpy", "numba", "cupy")
LINKS = ("wan", "1gbe", "10gbe", "100gbe", "nvlink")  # of cupynet.bench.cost_model
OBJECTIVES = {"accuracy": 1, "loss": -1, "f1": 1}  # of validation images; 1: more is better


def integer(
    name: str, value: Any, minimum: int | None = None, also: str = "", *, most: int = LONGEST - 1, why: str = ""
) -> int:
    """Return `value` as an int of at least `minimum` and at most `most`. NumPy's integers are accepted, bools are not.

    Args:
        also: the end of the message, such as ", or null".
        why: the reason for `most`.
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
    """Return `value` as a seed of 64 bits, the size of a Philox key."""
    return integer(name, value, 0, most=(1 << 64) - 1)


def pair(name: str, value: Any, minimum: int | None = None, also: str = "") -> tuple[int, int]:
    """Return `value` as (height, width), each of at least `minimum`, from an integer for both or a sequence of two."""
    height, width = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
    also = f", or a pair of them (height, width){also}"
    return integer(name, height, minimum, also), integer(name, width, minimum, also)


def number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None, below: float = math.inf,
    infinite: bool = False, unit: str = "", also: str = "",
) -> float:  # fmt: skip
    """Return `value` as a float above `above` or at least `minimum`, and below `below`.

    NaN is refused, and infinity unless `infinite`.
    """
    try:
        real = math.nan if is_bool(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        real = math.nan
    too_low = (above is not None and real <= above) or (minimum is not None and real < minimum)
    too_high = real >= below and not (infinite and real == math.inf)
    if math.isnan(real) or too_low or too_high:
        bounds = {"above": above, "of at least": minimum, "below": below if below < math.inf else None}
        limits = " and ".join(f"{how} {bound:g}" for how, bound in bounds.items() if bound is not None)
        what = f"number of {unit} {limits}" if unit else f"number {limits}"
        raise ConfigError(f"must be a {what.rstrip()}{also}", name, shown(value))
    return real


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool."""
    if not is_bool(value):
        raise ConfigError("must be true or false", name, shown(value))
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str]) -> str:
    """Return `value` if it is one of `names`."""
    known = list(names)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"must be one of {', '.join(known)}{guess(value, known)}", name, shown(value, str))
    return value


def on_device(name: str, value: Any, backend: str = "cupy") -> bool | str:
    """Return `value` if it is `auto`, true or false; true needs a GPU."""
    if isinstance(value, str) and value == "auto":
        return value
    if not is_bool(value):
        raise ConfigError("must be auto, true or false", name, shown(value, str))
    if value and backend != "cupy":
        raise ConfigError(f"is for GPUs, and {backend} computes on the CPU: leave it out", name, "true")
    return bool(value)


def dtype(name: str, value: Any) -> str:
    """Return one of `DTYPES`, from that name or NumPy's."""
    return one_of(name, DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value, DTYPES)


def block_size(name: str, value: Any) -> int:
    """Return `value` as the maximum number of threads of a GPU block: at least a warp."""
    return integer(name, value, 32, most=1024, why="no GPU takes more")


def grid_size(name: str, value: Any) -> int | None:
    """Return `value` as the maximum number of blocks of a kernel launch, or None for no limit."""
    return None if value is None else integer(name, value, 1, ", or null for no limit", most=(1 << 31) - 1)


def tf32_products(name: str, value: Any, backend: str, dtype: str) -> bool:
    """Return `value` as a bool: True to use TF32, which needs a GPU and dtype=float."""
    if flag(name, value) and backend != "cupy":
        raise ConfigError(f"is for GPUs, and {backend} computes on the CPU: leave it out", name, "true")
    if value and DTYPE_ALIASES.get(dtype, dtype) != "float":
        reason = f"is a way to multiply floats, and dtype={dtype}: leave it out, or use dtype=float"
        raise ConfigError(reason, name, "true")
    return bool(value)


SCALES = ("none", "linear", "sqrt")  # rules for the learning rate as workers grow


def learning_rate_scale(name: str, value: Any) -> str | float:
    """Return `value` as a rule to scale the learning rate: a name of `SCALES`, or a factor above 0."""
    if isinstance(value, str) and value in SCALES:
        return value
    return number(name, value, above=0, also=f", or one of {', '.join(SCALES)}{guess(value, SCALES)}")


def looks_channels_first(shape: Sequence[int]) -> bool:
    """Return True if the shape of an image, taken as (H, W, C), is much more likely (C, H, W)."""
    channels, height, width = shape
    return channels <= 4 < min(height, width) and max(height, width) <= 4 * min(height, width)


def layout_hint(found: Sequence[int], expected: Sequence[int]) -> str:
    """Return a hint on how to transpose channels-first images, to end a message about a wrong shape; or "".

    Args:
        found: (N, H, W, C) or (H, W, C).
        expected: (H, W, C).
    """
    if len(expected) != 3 or len(found) not in (3, 4) or tuple(found[-3:]) != (expected[2], *expected[:2]):
        return ""
    return f". Channels are first: use x.transpose({'0, 2, 3, 1' if len(found) == 4 else '1, 2, 0'})"


def instance(name: str, value: Any, kind: type[T], example: str) -> T:
    """Return `value` if it is a `kind`. example: for the message."""
    if isinstance(value, kind):
        return value
    own = f"the class {value.__name__}" if isinstance(value, type) else one(type(value).__name__)
    raise ConfigError(f"must be {one(kind.__name__)}, such as {example}", name, f"<{own}>")


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number of Python, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def is_bool(value: Any) -> bool:
    """Return True if `value` is a bool of Python or NumPy."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


# wording --------------------------------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """Replace every run of white space, including line breaks, by one space."""
    return " ".join(str(text).split())


def one(noun: str) -> str:
    """Return the noun with its article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def counted(count: int, noun: str) -> str:
    """Format a count: `1 image`, `2,000 images`, `3 classes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """Format a value for a message: on one line, of at most `SHOWN` characters."""
    try:
        text = one_line(text_of(value))
    except ValueError:  # an int of more digits than Python prints
        return f"<{one(type(value).__name__)}, too long to print>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def amount(size: float) -> str:
    """Format a number of bytes, in powers of 1000: `5.2 TB`, `521.0 TB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} EB"


def kept_out(images: int) -> int:
    """Return the number of training images to use for validation: a tenth, at most 5000."""
    return min(max(images // 10, 1), 5000)


def percent(share: float, digits: int = 2) -> str:
    """Return a share of one in percent: `98.90 %`."""
    return f"{100 * share:.{digits}f} %"


def listed(names: Iterable[str], last: str = "or") -> str:
    """`half, float or double`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def guess(value: object, names: Iterable[str]) -> str:
    """Return the end of a message about a value that is none of `names`: the most similar one, if there is one."""
    known, text = list(names), shown(value, str)
    match = get_close_matches(text, known, n=1) or get_close_matches(text.lower(), known, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known one, or all if none is similar."""
    names = sorted(known)
    return guess(name, names) or (f"; the names are {listed(names, 'and')}" if 1 < len(names) <= 24 else "")


def setting(group: str, name: str, *value: object, python: str = "") -> str:
    """Name a setting as on the command line and in Python: `data.limit=9 (in Python limit=9)`.

    Args:
        python: its name in Python if that is not the argument of the same name.
    """
    here = f"{group}.{name}" + "".join(f"={written(each)}" for each in value)
    return f"{here} (in Python {python or name + ''.join(f'={each!r}' for each in value)})"


def written(value: object) -> str:
    """Format a value as on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
