"""A parsed HTML page, and checks that every page must pass."""

import re
from collections.abc import Collection
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "wbr", "path", "use", "rect", "line", "stop"}


class Page(HTMLParser):
    """A parsed page. Raises AssertionError if its elements are not properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_alone(text: str, links: Collection[str | None] = ()) -> None:
    """Check that the page loads nothing, refers only to `links`, runs no script, and has unique names."""
    parsed = Page(text)
    assert not parsed.all("script") and not parsed.all("iframe") and not parsed.all("base")
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value in links or value.startswith(("data:", "#")), value
            assert value is None or not value.startswith("#") or value[1:] in names, value
    assert not re.search(r"url\((?!#)|@import|https?:", text)
