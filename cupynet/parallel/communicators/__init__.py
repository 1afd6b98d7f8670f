"""Communicators: how the workers of a run exchange numbers and arrays."""
