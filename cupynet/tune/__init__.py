"""Hyperparameter search: `python -m cupynet.tune`.

`__main__` is the command, `arguments` its command line, `study` the Optuna study, `results` the table and the files.
"""
