"""CPU backends: NumPy, and kernels compiled by Numba. Matrix products use BLAS or, in bfloat16, AMX units."""
