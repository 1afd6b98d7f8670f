"""Every operation once, written against an array module: NumPy or CuPy."""
