"""A run on disk: its folder, summary, history and checkpoints."""
