"""Hyperparameter search: `cupynet tune`.

`command` parses the command line, `search` runs the trials with Optuna, and `sampler` chooses their settings.
"""

TRIALS = "trials"  # folder of a search's trials, in its own folder
