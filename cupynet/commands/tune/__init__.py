"""Hyperparameter search: `cupynet tune`.

`command` reads the command line. `search` runs the trials with Optuna and prints their results.
"""
