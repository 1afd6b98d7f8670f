"""What a machine has, and what it lacks: `cupynet doctor [key=value ...]`.

Prints a line for each thing that training needs: `ok`, `note` (training works without it, or differently than one may
think) or `problem` (training fails), with the remedy. key=value: settings of `cupynet train`; the checks are then of
that run. The exit code is 0 if it would train here, otherwise the one that training would end with.

Each check runs in a process of its own, which may die or hang. Nothing is downloaded, and no file is left behind.
"""
