"""Sources load training and test sets."""
