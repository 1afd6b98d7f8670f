"""Hyperparameter search: `cupynet tune`."""

TRIALS = "trials"  # folder of a search's trials, in its own folder
