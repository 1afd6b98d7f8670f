"""Hyperparameter search: `cupynet tune`."""

TRIALS = "trials"  # folder of a search's trials, inside the search's folder
