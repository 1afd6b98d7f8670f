"""Web pages of runs, and the charts on them.

A page depends on nothing but the run's folder: this package reads files, and computes nothing else.
"""

from cupynet.reporting.callback import ReportPage

__all__ = ["ReportPage"]
