"""HTML reports of runs and comparisons. This package only reads files from the folders of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupynet.reporting.callback import ReportPage

__all__ = ["ReportPage"]


def __getattr__(name: str) -> object:
    """Load `ReportPage` on first use, so that writing a report does not import the training code."""
    if name != "ReportPage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cupynet.reporting.callback import ReportPage

    return ReportPage
