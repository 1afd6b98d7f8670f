"""Compares runs: the settings that differ, their results, and which to use."""
