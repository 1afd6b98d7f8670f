"""The files of a run: summary, history and checkpoints."""
