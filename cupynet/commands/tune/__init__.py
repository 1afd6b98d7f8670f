"""Hyperparameter search: `cupynet tune`.

`command` reads the command line. `search` runs the trials with Optuna and prints their results. `sampler` chooses
their settings.
"""

TRIALS = "trials"  # folder of a search's trials, in its own folder
