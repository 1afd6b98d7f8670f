"""The GPU: the only room of the package that imports CuPy, and only when it is used.

`backend` has the operations, `kernels/` their CUDA C++, `launch` the way from one to the other; `cublas` makes the
products; `convpool` is a convolution and its max-pool as one; `devices` says what there is.
"""

from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.devices import device_count, inventory, limit_pools, memory, probe, trim_pools

__all__ = ["CupyBackend", "device_count", "inventory", "limit_pools", "memory", "probe", "trim_pools"]
