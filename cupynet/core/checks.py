"""What arguments may be, checked in one place: every check returns the value in its plain type or raises a ConfigError.

A message names the value, what it must be and, where there is one, the other way out:
`Conv2D filters=0: must be an integer of at least 1`. NumPy's scalars are taken like Python's; a bool is no number.
A refusal carries its reason alone too, for whoever writes the value in another way: the command line says
`filters=zero` where Python says `filters='zero'`. What messages are made of stands below the checks.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from cupynet.core.errors import ConfigError

T = TypeVar("T")
SHOWN = 80  # characters of a value in a message
LONGEST = 1 << 63  # what an integer must be smaller than: it is to be counted with, in arrays and files too

# Names are listed here because settings are read without NumPy, which every file of cupynet.backend imports.
DTYPES = ("half", "bfloat16", "float", "double")
DTYPE_ALIASES = {"float16": "half", "float32": "float", "float64": "double"}  # NumPy's names are taken too
BACKENDS = ("numpy", "numba", "cupy")
LINKS = ("wan", "1gbe", "10gbe", "100gbe", "nvlink")  # of cupynet.bench.cost_model
OBJECTIVES = {"accuracy": 1, "loss": -1, "f1": 1}  # of validation images; 1: more is better


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
    """`value` as an int of at least `minimum`, smaller than `below` and at most `most`, and in any case of 64 bits.

    `why` gives the reason for `most`; `also` ends the message (", or null").
    """
    try:
        number = None if is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum) or (below is not None and number >= below):
        least = "" if minimum is None else f" of at least {minimum}"
        bound = "" if below is None else f"{' and' if least else ''} below {'2**64' if below == 1 << 64 else below}"
        raise refusal(name, shown(value), f"must be an integer{least}{bound}{also}")
    if most is not None and number > most:
        raise refusal(name, shown(value), f"must be at most {most}{also}{why and f': {why}'}")
    if below is None and not -LONGEST < number < LONGEST:  # no array counts so far, and no float holds all of them
        raise refusal(name, shown(value), f"must be {'below ' if number > 0 else 'above -'}2**63{also}")
    return number


def seed(name: str, value: Any) -> int:
    """`value` as a seed: 64 bits, which is what the key of a Philox generator has room for."""
    return integer(name, value, 0, below=1 << 64)


def pair(name: str, value: Any, minimum: int | None = None, also: str = "") -> tuple[int, int]:
    """`value` as ints (height, width), each of at least `minimum`: a number for both, or a list or tuple of two."""
    both = tuple(value) if isinstance(value, list | tuple) else (value, value)
    try:
        height, width = (integer(name, each, minimum) for each in both)
    except ValueError as error:
        least = "" if minimum is None else f" of at least {minimum}"
        reason = f"must be an integer{least}, or a pair of them (height, width){also}"
        raise refusal(name, shown(value), reason) from error
    return height, width


def number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None, below: float = math.inf,
    infinite: bool = False, unit: str = "", also: str = "",
) -> float:  # fmt: skip
    """`value` as a float that is above `above` or at least `minimum`, and smaller than `below`.

    NaN is refused, and positive infinity too unless `infinite`.
    """
    try:
        real = math.nan if is_bool(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        real = math.nan
    fits = (
        (above is None or real > above)
        and (minimum is None or real >= minimum)
        and (real < below or (infinite and real == math.inf))
    )
    if not fits:
        bounds = (
            [f"above {above:g}"] if above is not None else [f"of at least {minimum:g}"] if minimum is not None else []
        )
        bounds += [f"below {below:g}"] if below < math.inf else []
        what = f"number of {unit}" if unit else "number"
        raise refusal(name, shown(value), f"must be a {what} {' and '.join(bounds)}".rstrip() + also)
    return real


LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of single precision, the narrowest that weights are moved in


def single(name: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> float:
    """`number`, if single precision has it: what is 0 or infinite there would be told of as a training diverged."""
    real = number(name, value, above=above, minimum=minimum)
    if real and not LEAST <= abs(real) <= MOST:
        held = "infinite" if abs(real) > MOST else "0"
        raise refusal(
            name, shown(value), f"is {held} in single precision, which has sizes of {LEAST:.2g} to {MOST:.2g}"
        )
    return real


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, if it is one."""
    if not is_bool(value):
        raise refusal(name, shown(value), "must be true or false")
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str]) -> str:
    """`value` if it is one of `names`."""
    known = list(names)
    if not isinstance(value, str) or value not in known:
        raise refusal(name, shown(value, str), f"must be one of {', '.join(known)}{guess(value, known)}")
    return value


def on_device(name: str, value: Any) -> bool | str:
    """`value` if it is `auto`, or true or false."""
    if not is_bool(value) and not (isinstance(value, str) and value == "auto"):
        raise refusal(name, shown(value, str), "must be auto, true or false")
    return value if isinstance(value, str) else bool(value)


def dtype(name: str, value: Any) -> str:
    """`value` as the name of a precision, one of `DTYPES`; NumPy's names for them are taken too."""
    return one_of(name, DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value, DTYPES)


def block_size(name: str, value: Any) -> int:
    """`value` as the most threads that a block on a GPU may have: a warp at least."""
    return integer(name, value, 32, most=1024, why="no GPU takes more")


def grid_size(name: str, value: Any) -> int | None:
    """`value` as the most blocks that a launch on a GPU may have, or None for no limit."""
    return None if value is None else integer(name, value, 1, ", or null for no limit", most=(1 << 31) - 1)


def tf32_products(name: str, value: Any, backend: str, dtype: str) -> bool:
    """`value` as whether products are made in TF32, which GPUs alone do, for floats alone."""
    if flag(name, value) and backend != "cupy":
        raise refusal(name, "true", f"is for GPUs, and {backend} computes on the CPU: leave it out")
    if value and DTYPE_ALIASES.get(dtype, dtype) != "float":
        raise refusal(
            name, "true", f"is a way to multiply floats, and dtype={dtype}: leave it out, or take dtype=float"
        )
    return bool(value)


SCALES = ("none", "linear", "sqrt")  # rules for the learning rate as workers grow


def learning_rate_scale(name: str, value: Any) -> str | float:
    """`value` as a rule for the learning rate as workers grow: a name of `SCALES`, or a factor above 0."""
    if isinstance(value, str) and value in SCALES:
        return value
    return number(name, value, above=0, also=f", or one of {', '.join(SCALES)}{guess(value, SCALES)}")


def instance(name: str, value: Any, kind: type[T], example: str) -> T:
    """`value` if it is a `kind`; a class where an object is needed is said to be one. `example`: what to write."""
    if isinstance(value, kind):
        return value
    own = f"the class {value.__name__}" if isinstance(value, type) else one(type(value).__name__)
    raise ConfigError(f"{name} is {own}: must be {one(kind.__name__)}, such as {example}")


def is_bool(value: Any) -> bool:
    """Whether `value` is a bool of Python or NumPy."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


# wording --------------------------------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """The text with every run of white space, line breaks included, made one blank."""
    return " ".join(str(text).split())


def one(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def counted(count: int, noun: str) -> str:
    """How many there are: `1 image`, `2,000 images`, `3 classes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """A value as messages show it: on one line, shortened to `SHOWN` characters."""
    try:
        text = re.sub(r"<(?:[\w.<>]+\.)?(\w+) object at 0x[0-9a-f]+>", r"\1(...)", one_line(text_of(value)))
    except ValueError:  # an int of more digits than Python prints
        return f"<{one(type(value).__name__)}, too long to print>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def amount(size: int) -> str:
    """Bytes in the largest unit of which there is at least one, powers of 1000: `5.2 TB`, `52.1 TB`, `521 TB`."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min((len(str(size)) - 1) // 3, len(units) - 1)
    if 0 < power < len(units) - 1 and round(size / 1000**power) >= 1000:  # as it is shown: 999,500,000 are 1.0 GB
        power += 1
    if power == len(units) - 1 and size >= 1000 ** (power + 1):
        return f"10^{len(str(size)) - 19} {units[-1]}"
    count = size / 1000**power
    return f"{count:.{1 if power and round(count, 1) < 100 else 0}f} {units[power]}"


def kept_out(images: int) -> int:
    """How many of so many training images it is usual to keep out, to choose by: a tenth, at most 5000."""
    return min(max(images // 10, 1), 5000)


def percent(share: float, digits: int = 2) -> str:
    """A share of one in percent: `98.90 %`."""
    return f"{100 * share:.{digits}f} %"


def listed(names: Iterable[str], last: str = "or") -> str:
    """`half, float or double`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def guess(value: object, names: Iterable[str]) -> str:
    """The end of a message about a value that is none of `names`: the one it is most like, if any is near."""
    match = get_close_matches(shown(value, str).lower(), list(names), n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one it is most like, or all of them when none is near."""
    names = sorted(known)
    match = get_close_matches(name, names, n=1) or get_close_matches(name.lower(), names, n=1)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; the names are {listed(names, 'and')}" if 1 < len(names) <= 24 else ""


def setting(group: str, name: str, *value: object, python: str = "") -> str:
    """What to set, for whoever knows it from the command line and for whoever from Python, with or without a value.

    `data.limit=9 (in Python limit=9)`: what a library says reaches both.

    python: what it is there, where that is not the argument of the same name.
    """
    here = f"{group}.{name}" + "".join(f"={written(each)}" for each in value)
    return f"{here} (in Python {python or name + ''.join(f'={each!r}' for each in value)})"


def written(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
