"""Recognizes out-of-memory errors and failed devices by the messages of CuPy errors. Other errors are probably bugs."""

from __future__ import annotations

import re

from cupynet.backend.cuda.gpus import pool
from cupynet.backend.device import Failure
from cupynet.core.exits import out_of_gpu_memory
from cupynet.core.wording import amount, one_line, setting

ALLOCATING = re.compile(r"allocating ([\d,]+) bytes")  # in CuPy's OutOfMemoryError
# sticky errors, raised by every later call until the process ends; NCCL does not distinguish CUDA errors
LOST = re.compile(
    "cudaError(LaunchFailure|LaunchTimeout|ECCUncorrectable|NvlinkUncorrectable|HardwareStackError|DevicesUnavailable"
    "|NoDevice|Unknown|SystemNotReady|Contained|MpsConnectionFailed|MpsRpcFailure)"
    "|CUDA_ERROR_(LAUNCH_FAILED|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR"
    "|DEVICE_UNAVAILABLE|UNKNOWN)|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|NCCL_ERROR_UNHANDLED_CUDA_ERROR"
)


def failure(error: BaseException, device: int) -> Failure | None:
    text = one_line(error)
    if isinstance(error, RuntimeError) and LOST.search(text):
        return Failure(
            f"device {device} has failed ({text}), and its pending work is lost. See the system log (dmesg, nvidia-smi "
            "-q), and resume from the last checkpoint, on other devices if this one does not recover",
            of_memory=False,
        )
    if not out_of_gpu_memory(error):
        return None
    own_pool, allocation = pool(device), ALLOCATING.search(text)
    needed = text.rstrip(".") if allocation is None else f"it needs {amount(int(allocation[1].replace(',', '')))} more"
    limit = ""
    if own_pool.limit is not None:
        limit = f", limited by {setting('memory', 'device_pool_limit', amount(own_pool.limit))},"
    usage = f"its pool{limit} holds {amount(own_pool.held)}, {amount(own_pool.used)} of it in use"
    return Failure(f"device {device} is out of memory: {needed}; {usage}", of_memory=True)
