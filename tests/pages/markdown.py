"""Markdown for the reference pages."""

import re
from collections.abc import Iterable
from textwrap import fill
from typing import Any

CODE = "|".join(  # text shown as code
    [
        r"`[^`]+`",
        r"\[?\{_target_[^;]*[\]}]+",
        r"\[+\w+(?:[],[]+\w+)+\]+|\[\w+\*\]",  # a list
        r"\+?[\w.]+=(?:\.\.\.|[^\s;)|]*[^\s;)|.,:])",  # a setting and its value
        r"(?:[\w<>*$-]+/)+(?:[\w<>*-]+(?:\.\w+)+)?(?=[ ,;:)]|$)",  # a file or a folder
        r"[A-Za-z][\w-]+(?:\.[A-Za-z]\w*)+",  # a dotted name
        r"\w*[a-z]_[\w.]*\w|_target_|\$\w+",
    ]
)


def marked(text: str) -> str:
    """Return plain text as Markdown: text that looks like code becomes code, special characters are escaped."""
    parts = re.split(rf"((?<![\w`/$<.+])(?:{CODE})(?![\w/*(]))", text)
    parts[::2] = [re.sub(r"([<*]|(?<!\w)_|_(?!\w))", r"\\\1", each) for each in parts[::2]]
    parts[1::2] = [f"`{each.strip('`')}`" for each in parts[1::2]]
    return re.sub(r"(?<=[^` ])` `(?=[\w.]+=)", " ", "".join(parts))  # merges consecutive settings


def meaning(comment: str) -> str:
    """Return a comment as Markdown. The values in `auto: the best | none` are code."""
    text = " ".join(comment.split())
    for first in (
        r"(^|: )([\w.-]+)(?=(?: \([^|]*\))? \|)",
        r"(^|: )([\w.-]+)(?=[:,] [^|]*\|)",
        r"^()([a-z]+)(?=: [^|]*$)",
    ):
        if "`" not in text:
            text = re.sub(first, r"\1`\2`", text, count=1)
    text = re.sub(r"(?<=\| )([\w.-]+)(?=$|[:;,]| [|(.])", r"`\1`", text)
    text = marked(re.sub(r"(?<![\w`.])(?:(?:null|\d+)(?= = )|true(?=, or))", r"`\g<0>`", text))
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+\b(?! \|)", text) else text


def wrapped(text: str, first: str = "", then: str = "") -> str:
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return fill(text, 120, initial_indent=first, subsequent_indent=then, **options)


def table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(each.replace("|", r"\|") for each in row) for row in rows]
    return "\n".join(
        f"| {each} |" for each in [head, re.sub(r"[\w ]+", " --- ", f" {head} ").strip(), *lines] * bool(lines)
    )


def joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts))


def codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)
