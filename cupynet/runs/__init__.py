"""A run on disk: its folder, summary, history and checkpoints."""

from cupynet.runs.run import Run, Summary

__all__ = ["Run", "Summary"]
