"""Hyperparameter search: `cupynet tune`.

`arguments` reads the command line, `search` runs the trials, `study` keeps them with Optuna, `results` prints them.
"""
