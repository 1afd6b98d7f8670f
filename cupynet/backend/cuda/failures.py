"""Messages for CuPy errors of a device that is out of memory or has failed, recognized by the names in their texts.

Illegal addresses or instructions are most likely bugs of a kernel, and keep their traceback.
"""

from __future__ import annotations

import re

from cupynet.backend.cuda.gpus import pool
from cupynet.backend.device import Failure
from cupynet.core.wording import amount, one_line

NO_MEMORY = re.compile("OutOfMemoryError|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|_STATUS_ALLOC_FAILED")
# After one of these, every call on the device raises it until the process ends. NCCL reports all errors alike.
LOST = re.compile(
    "cudaError(LaunchFailure|LaunchTimeout|ECCUncorrectable|NvlinkUncorrectable|HardwareStackError|DevicesUnavailable"
    "|NoDevice|Unknown|SystemNotReady|Contained|MpsConnectionFailed|MpsRpcFailure)"
    "|CUDA_ERROR_(LAUNCH_FAILED|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR"
    "|DEVICE_UNAVAILABLE|UNKNOWN)|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|NCCL_ERROR_UNHANDLED_CUDA_ERROR"
)


def failure(error: BaseException, device: int) -> Failure | None:
    """Diagnose a CuPy error of the device; return None for any other error."""
    text, kind = one_line(error), type(error).__name__
    if isinstance(error, RuntimeError) and LOST.search(text):
        return Failure(
            f"device {device} has failed ({text}), and its pending work is lost. See the system log (dmesg, nvidia-smi "
            "-q), and resume from the last checkpoint, on other devices if this one does not recover",
            of_memory=False,
        )
    if not isinstance(error, RuntimeError | MemoryError) or not NO_MEMORY.search(f"{kind}: {text}"):
        return None
    there = pool(device)
    limit = "without a limit" if there.limit is None else f"of at most {amount(there.limit)}"
    holds = f"its pool, {limit}, holds {amount(there.held)}, {amount(there.used)} of it in use"
    return Failure(f"device {device} is out of memory: {text.rstrip('.')}; {holds}", of_memory=True)
