"""Runs beside each other: which settings differ, what came of them, and which to use."""
