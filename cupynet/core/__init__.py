"""What everything else builds on: errors, argument validation, files, locks, signals, the terminal."""
