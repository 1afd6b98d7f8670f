"""Compiled kernels for the CPU, the only package that imports numba and LLVM.

Convolutions without im2col: `windows` (forward, with its max-pool), `rows` and `outer` (its gradients), `tiles`
(without a pool), `depthwise`; they are built from `vectors` and `patches`. `jit` compiles, `cache` keeps the result on
disk.
"""
