"""The GPU: the only room of the package that imports CuPy, and only when it is used.

`backend` has the operations, `kernels/` their CUDA C++, `launch` the way from one to the other; `convpool` is a
convolution and its max-pool as one; `devices` says what there is. `feeds` is how batches come here: `resident` gathers
them from images that stay, `ring` sends them ahead through `staging`.
"""

from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.devices import device_count, inventory, limit_pools, memory, probe, trim_pools
from cupynet.backend.cuda.resident import fits

__all__ = ["CupyBackend", "device_count", "fits", "inventory", "limit_pools", "memory", "probe", "trim_pools"]
