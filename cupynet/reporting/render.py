"""Rendering of HTML pages. A page is a single file without scripts or network requests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cupynet.core.terminal import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> bytes:
    """Render a template as an HTML page. Values are escaped, and control characters are replaced."""
    return printable(_environment().get_template(template).render(values)).encode()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import

    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
