"""HTML reports of runs and comparisons, created from the files in run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupynet.reporting.callback import ReportPage

__all__ = ["ReportPage"]


def __getattr__(name: str) -> object:
    """Import `ReportPage` on first use, so that writing a report does not import the training code."""
    if name != "ReportPage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cupynet.reporting.callback import ReportPage

    return ReportPage
