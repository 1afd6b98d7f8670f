"""The operations on a CPU: compiled by numba, products by BLAS."""
