"""What a machine has, and what it lacks: `cupynet doctor [key=value ...]`.

A line for each thing that training rests on: `ok`, `note` (training works without it, or differently than one may
think) or `problem` (it does not), each with the way out. key=value: settings of `cupynet train`, whose run is then the
one that is asked about. It ends with 0 where that would train here, else with the code that training would end with.

Nothing is taken for granted: this process uses the standard library alone, and each check runs in a process of its own
that may die or hang. Nothing is downloaded, and no file is left behind.
"""
