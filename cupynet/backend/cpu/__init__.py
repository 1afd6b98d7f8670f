"""CPU backends: NumPy, and kernels compiled by numba. Matrix products use BLAS."""
