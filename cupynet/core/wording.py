"""Formatting of messages: counts, sizes, lists, values, and suggestions of similar names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches

SHOWN = 80  # number of characters of a value in a message


def one_line(text: object) -> str:
    """Collapse white space, including line breaks, to single spaces."""
    return " ".join(str(text).split())


def one(noun: str) -> str:
    """Prepend the indefinite article to a noun."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def counted(count: int, noun: str) -> str:
    """Format a count: `1 image`, `2,000 images`, `3 classes`."""
    hissing = noun.endswith(("s", "ch")) and noun != "epoch"
    return f"{count:,} {noun}{'' if count == 1 else 'es' if hissing else 's'}"


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """Format a value on one line, truncated after `SHOWN` characters."""
    try:
        text = one_line(text_of(value))
    except ValueError:  # an int with too many digits for str()
        return f"<{one(type(value).__name__)}, too long to print>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def amount(size: float) -> str:
    """Format a number of bytes with decimal units: `521 bytes`, `5.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} EB"


def percent(share: float, digits: int = 2) -> str:
    """Format a fraction as a percentage: `98.90 %`."""
    return f"{100 * share:.{digits}f} %"


def listed(names: Iterable[str], last: str = "or") -> str:
    """Join names for a sentence: `half, float or double`."""
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def guess(value: object, names: Iterable[str]) -> str:
    """Return a suggestion to append to a message, or "" if there is none.

    It is a name with these initials (lr), a name that begins like this (acc), or the most similar name.
    """
    known, text = list(names), shown(value, str)
    match = [name for name in known if "_" in name and _initials(name) == text]
    match = match or [name for name in known if len(text) > 2 and name.startswith(text)]
    match = match or get_close_matches(text, known, n=1) or get_close_matches(text.lower(), known, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _initials(name: str) -> str:
    group, dot, own = name.rpartition(".")
    return f"{group}{dot}{''.join(word[:1] for word in own.split('_'))}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a message. If no name is similar, list the known names if there are 2 to 24."""
    names = sorted(known)
    return guess(name, names) or (f"; the names are {listed(names, 'and')}" if 1 < len(names) <= 24 else "")


def setting(group: str, name: str, *value: object, python: str = "") -> str:
    """Format a setting in command-line and Python syntax: `data.limit=9 (in Python limit=9)`.

    python: how to set it in Python, if there is no argument with this name.
    """
    name_and_value = f"{group}.{name}" + "".join(f"={written(item)}" for item in value)
    return f"{name_and_value} (in Python {python or name + ''.join(f'={item!r}' for item in value)})"


def written(value: object) -> str:
    """Format a value as on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
