"""HTML pages of one file: the document, its style, and the pieces that they are put together from. Nothing but Python.

Everything is text that has been escaped, or `Markup`, which is HTML already: a piece takes either, so that what was
read from a folder cannot become part of a page unescaped. A page refers to nothing outside itself and needs no script.
It follows the reader's choice of light or dark, is printed in light colours, and fits a width of 320 pixels: what is
wider, a table, is scrolled by itself.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple, TypeAlias

from cupynet.checks import percent


class Markup(str):
    """HTML: it is put into a page as it stands."""

    __slots__ = ()


Text: TypeAlias = str  # escaped where it is put into a page, unless it is `Markup`
COLOURS = 6  # that lines of a chart can have: --c0 to --c5 of the style, for light and for dark


class Entry(NamedTuple):
    """One line of a legend: its name, which colour it has, and whether it is dashed."""

    name: str
    colour: int
    dashed: bool = False


def escape(text: object) -> Markup:
    """`text` as it can stand anywhere in a page, in quotes too; `Markup` as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=True))


def join(parts: Iterable[Text], between: str = "") -> Markup:
    """One piece after the other."""
    return Markup(between.join(escape(part) for part in parts))


def element(name: str, *inside: Text, **attributes: object) -> Markup:
    """`<name attribute="...">inside</name>`; `class_` is class, an underscore a hyphen, and None leaves it out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(inside)}</{name}>")


def document(title: str, *body: Text, refresh_s: int | None = None) -> str:
    """A whole page. refresh_s: after so many seconds the browser reads it again; None: it is complete."""
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    again = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        # nothing is fetched and nothing is run, whatever a run has called its classes
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f'{again}<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n<main>\n{join(body, chr(10))}\n</main>\n</body>\n</html>\n"
    )
    return text.encode(errors="replace").decode()  # JSON may hold half a character, which no file can


def header(title: Text, *, marks: Iterable[Text] = (), lead: Text = "", over: Text = "cupynet") -> Markup:
    """The head of a page: what it is of, what is to be known at once, and a sentence."""
    return element(
        "header",
        element("p", over, class_="over"),
        element("h1", title),
        element("p", *marks, class_="marks"),
        element("p", lead, class_="lead") if lead else "",
    )


def mark(text: Text, kind: str = "plain") -> Markup:
    """A word in a frame. kind: plain | good | bad | warn | live."""
    return element("span", text, class_=f"mark {kind}")


def section(title: Text, *body: Text, note: Text = "", anchor: str | None = None) -> Markup:
    """A part of a page under a heading; nothing where its body is empty."""
    inside = join(body, "\n")
    if not inside:
        return Markup("")
    lead = element("p", note, class_="note") if note else ""
    return element("section", element("h2", title), lead, inside, id=anchor)


def tiles(rows: Iterable[tuple[Text, Text, Text]]) -> Markup:
    """Large figures beside each other: (name, figure, what is to be said of it)."""
    return element(
        "div",
        *(
            element(
                "div",
                element("div", name, class_="name"),
                element("div", figure, class_="figure"),
                element("div", said, class_="said") if said else "",
                class_="tile",
            )
            for name, figure, said in rows
        ),
        class_="tiles",
    )


def table(
    head: Sequence[Text], rows: Iterable[Sequence[Text]], *, numbers: Iterable[int] = (), caption: Text = ""
) -> Markup:
    """A table that is scrolled by itself where it is too wide. numbers: which columns hold figures."""
    right = dict.fromkeys(numbers, "number")
    body = [
        element("tr", *(element("td", cell, class_=right.get(index)) for index, cell in enumerate(row))) for row in rows
    ]
    top = element(
        "thead",
        element("tr", *(element("th", cell, class_=right.get(i), scope="col") for i, cell in enumerate(head))),
    )
    titled = element("caption", caption) if caption else ""
    inside = element("table", titled, top if head else "", element("tbody", *body))
    return element("div", inside, class_="scroll", tabindex=0)


def facts(rows: Iterable[tuple[Text, Text]]) -> Markup:
    """Names and what they stand for, in two columns."""
    return element("dl", *(join((element("dt", name), element("dd", value))) for name, value in rows), class_="facts")


def command(text: str) -> Markup:
    """A command line, to be copied."""
    return element("pre", element("code", text), tabindex=0)


def folded(title: Text, *body: Text) -> Markup:
    """What is shown when its title is clicked on; a printed page shows the title alone."""
    return element("details", element("summary", title), *body)


def legend(entries: Iterable[Entry]) -> Markup:
    """Which line of a chart is what."""
    return element(
        "span",
        *(
            element("span", element("i", class_=f"line{' dashed' * dashed} c{colour}"), name)
            for name, colour, dashed in entries
        ),
        class_="legend",
    )


def chart(title: Text, svg: Text, entries: Iterable[Entry] = (), note: Text = "") -> Markup:
    """A chart with its title above and its legend below."""
    shown = list(entries)
    below = [legend(shown) if shown else "", element("span", note, class_="said") if note else ""]
    caption = element("figcaption", *below) if any(below) else ""
    return element("figure", element("h3", title), svg, caption, class_="chart")


def charts(figures: Iterable[Text]) -> Markup:
    """Charts beside each other, as many as there is room for; nothing where there are none."""
    shown = [each for each in figures if each]
    return element("div", *shown, class_="charts") if shown else Markup("")


def picture(png: bytes, alt: str, *, size: tuple[int, int], class_: str = "pixels") -> Markup:
    """A picture within the page. size: width and height in CSS pixels."""
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return Markup(
        f'<img src="{source}" alt="{escape(alt)}" width="{size[0]}" height="{size[1]}" class="{escape(class_)}">'
    )


def bars(rows: Iterable[tuple[Text, Sequence[float]]], entries: Sequence[Entry]) -> Markup:
    """Rows of 100 %, each cut into shares (0..1) in the colours of the entries."""
    lines = []
    for name, shares in rows:
        pieces = [
            element(
                "span",
                class_=f"c{entry.colour}",
                style=f"width:{100 * min(max(share, 0.0), 1.0):.2f}%",
                title=f"{entry.name} {percent(share, 1)}",
            )
            for share, entry in zip(shares, entries, strict=True)
        ]
        said = ", ".join(f"{entry.name} {percent(share, 0)}" for share, entry in zip(shares, entries, strict=True))
        lines.append(
            join(
                (element("dt", name), element("dd", element("div", *pieces, class_="bar", role="img", aria_label=said)))
            )
        )
    return join((element("dl", *lines, class_="bars"), element("p", legend(entries), class_="below")))
