"""Callbacks receive training events."""

from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.history import History

__all__ = ["Callback", "History"]
