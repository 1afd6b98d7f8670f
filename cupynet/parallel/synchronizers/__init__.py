"""Synchronization methods for data-parallel training."""
