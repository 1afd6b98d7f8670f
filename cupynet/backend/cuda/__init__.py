"""The GPU: the only room of the package that imports CuPy, and only when it is used.

`backend` has the operations, `kernels/` their CUDA C++, `launch` the way from one to the other; `cublas` makes the
products; `convpool` is a convolution and its max-pool as one; `recording` makes one launch of all those of a step.
`resident` gathers batches from images that stay here, `ring` sends them ahead through `staging`. `devices` says what
there is, `pools` what memory they hold, `failures` why they cannot go on.
"""

from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.devices import device_count, inventory, memory, probe
from cupynet.backend.cuda.pools import Pool, limit_pools, pinned_blocks, pool, trim_pools

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
