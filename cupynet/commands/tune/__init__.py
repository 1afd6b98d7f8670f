"""Hyperparameter search: `cupynet tune`."""
