"""The GPU: the only package that imports CuPy, and only when it is used.

`device` has arrays, streams and transfers; the operations are in files of the same names as in reference/, their CUDA
C++ in `kernels/`, and `launch` calls it. `cublas` multiplies matrices; `conv_pool` fuses a convolution and a max-pool;
`graph_capture` records a step as one launch. `transfer` fills batches, from images kept on the GPU or on the host.
`devices` lists GPUs, `memory_pools` limits their memory, `failures` diagnoses their errors.
"""

from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.devices import device_count, inventory, memory, probe
from cupynet.backend.cuda.memory_pools import Pool, limit_pools, pinned_blocks, pool, trim_pools

__all__ = [
    "CupyBackend",
    "Pool",
    "device_count",
    "inventory",
    "limit_pools",
    "memory",
    "pinned_blocks",
    "pool",
    "probe",
    "trim_pools",
]
