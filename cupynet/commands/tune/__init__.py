"""Hyperparameter search: `cupynet tune`.

`command` reads the command line. `search` runs the trials with Optuna and prints their results. `sampler` draws their
settings.
"""

TRIALS = "trials"  # in the folder of a search: the runs of its trials
