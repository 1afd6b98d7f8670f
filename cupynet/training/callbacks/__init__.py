"""Callbacks receive training events."""

from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.history import HistoryWriter

__all__ = ["Callback", "HistoryWriter"]
