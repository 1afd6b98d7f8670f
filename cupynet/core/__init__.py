"""Foundations of the package: errors, argument validation, files, locks, signals, the terminal."""
