"""The search for good settings: `python -m cupynet.tune`.

__main__.py is the command, study.py what is known of a search and what it tries next (Optuna's only home), search.py
the trials one after the other or side by side, trial.py what one of them is, told.py what people are shown of it.
"""
