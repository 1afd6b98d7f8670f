"""Comparison of runs: differing settings, results, and a recommendation."""
