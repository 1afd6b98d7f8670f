"""Reference implementation of every operation, for NumPy and CuPy arrays."""
