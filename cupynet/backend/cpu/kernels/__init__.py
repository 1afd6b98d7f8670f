"""Compiled kernels for the CPU: the only folder that imports numba and LLVM.

`pool`, `activation`, `norm`, `dropout`, `dense` and `update` have the names of the operations; `images` makes
batches. Convolutions without im2col: `windows` (forward, with its max-pool), `rows` and `outer` (its gradients),
`tiles` (without a pool), `depthwise`; they are built from `vectors` and `patches`. `jit` compiles, `cache` keeps the
result on disk.
"""
