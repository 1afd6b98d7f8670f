"""Callbacks receive training events."""
