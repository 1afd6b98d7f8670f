"""Renders pages from templates/: each is one file that runs no script and requests nothing from the network."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cupynet.core.terminal import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> bytes:
    """Render a template as an HTML page.

    All values are escaped by Jinja. Control and bidirectional characters are replaced in the whole page.
    """
    return printable(_environment().get_template(template).render(values)).encode()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not before a page is made

    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
