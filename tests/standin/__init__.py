"""A stand-in for CuPy and a GPU.

CUDA's words for a C++ compiler (include/, host.py), and a CuPy that computes on the CPU and forgives nothing: `with
installed(devices=2) as machine:` puts it into `sys.modules`. It holds what cupynet uses of CuPy and nothing else. Tests
marked `gpu` run on it, in the whole process, by `python -m tests.standin -m pytest -m gpu`.

    modules.py      puts the modules in and out               errors.py       the misuses
    machine.py      the one way an operation goes             order.py        streams as lines, vector clocks
    memory.py       pools, blocks, canaries; pinned.py        streams.py      devices, streams, events, graphs
    arrays.py       arrays and their operators; functions.py  kernels.py      .cu text, launched on the CPU
    collectives.py  NCCL; peers.py: copies by address         cublas.py       libcublas, for ctypes
    __main__.py     whole commands                            gpu_only.py     selects tests marked gpu
"""

from tests.standin.errors import Misuse
from tests.standin.modules import installed

__all__ = ["Misuse", "installed"]
