"""The files of a run, which are its summary, history and checkpoints."""
