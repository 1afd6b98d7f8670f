"""The search for good settings: `python -m cupynet.tune`.

__main__.py is the command, study.py what is known of a search and what it tries next (Optuna's only home), search.py
the trials one after the other or side by side, tried.py what is known of one, trial.py its process, judged.py what that
asks, asked.py what a search is asked for and refused, told.py what people are shown of it.
"""
