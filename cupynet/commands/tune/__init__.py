"""Hyperparameter search: `cupynet tune`.

`arguments` reads the command line, `search` runs the trials, `study` stores them with Optuna, `results` prints them.
"""
