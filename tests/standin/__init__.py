"""A stand-in for CuPy and a GPU.

CUDA's keywords for a C++ compiler (include/, host.py), and a CuPy that computes on the CPU and detects misuse.
`with installed(devices=2) as machine:` puts it into `sys.modules`. It has only those parts of CuPy that cupynet uses.
`python -m tests.standin -m pytest -m gpu` runs the tests marked `gpu` on it.

    modules.py      installs and removes the modules          errors.py       the misuses
    machine.py      how every operation runs                  order.py        streams as lines, vector clocks
    memory.py       pools and blocks                          streams.py      devices, streams, events, graphs
    arrays.py       arrays and their operators; functions.py  kernels.py      .cu text, launched on the CPU
    collectives.py  NCCL                                      cublas.py       libcublas, for ctypes
    pinned.py       pinned memory, copies by address          gpu_only.py     selects tests marked gpu
    __main__.py     whole commands
"""

from tests.standin.errors import Misuse
from tests.standin.modules import installed

__all__ = ["Misuse", "installed"]
