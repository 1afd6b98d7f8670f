"""Compiled CPU kernels. This is the only package that imports numba and LLVM.

`windows` computes a convolution and its max-pool, and `rows` and `outer` its gradients. `winograd_pool` and `winograd`
use Winograd's algorithm, `tiles` computes other convolutions directly, and `depthwise` computes convolutions with one
channel per filter. `jit` compiles kernels, and `cache` stores them on disk.
"""
