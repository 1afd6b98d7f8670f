"""Compiled CPU kernels (see guides/kernels.md). This is the only package that imports Numba and llvmlite."""
