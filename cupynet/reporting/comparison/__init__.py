"""Comparison of runs: the settings that differ, the results, and a recommendation."""
