"""Web pages of runs, and the charts on them.

A page depends on nothing but the run's folder: this package reads files, and computes nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupynet.reporting.callback import ReportPage

__all__ = ["ReportPage"]


def __getattr__(name: str) -> object:
    """Load `ReportPage` when it is first used: it is a callback of training, and pages need nothing of that."""
    if name != "ReportPage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cupynet.reporting.callback import ReportPage

    return ReportPage
