"""Data sources, which load training and test sets."""
