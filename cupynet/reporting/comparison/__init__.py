"""Comparison of runs, with the settings that differ, the results, and a recommendation."""
