"""Compiled code for the CPU: the only folder that imports numba and LLVM.

`loops` is plain loops; `windows`, `rows` and `outer` are the convolution under a max-pool, in vector registers;
`vectors` is what these three are made of, and `patches` what they are told. `cache` keeps what was compiled.
"""
