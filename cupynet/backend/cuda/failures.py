"""Messages for CuPy errors of a device that is out of memory or has failed.

Errors are recognized by the names in their texts. Errors of an address or an instruction (`cudaErrorIllegalAddress`)
are not among them: they are most likely bugs of a kernel, and keep their traceback.
"""

from __future__ import annotations

import re

from cupynet.backend.cuda.memory_pools import pool
from cupynet.backend.device import Failure
from cupynet.core.checks import amount, one_line

NO_MEMORY = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "_STATUS_ALLOC_FAILED")
# after one of these, every call on the device raises it until the process ends
LOST = (
    *("cudaErrorLaunchFailure", "cudaErrorLaunchTimeout", "cudaErrorECCUncorrectable", "cudaErrorNvlinkUncorrectable"),
    *("cudaErrorHardwareStackError", "cudaErrorDevicesUnavailable", "cudaErrorNoDevice", "cudaErrorUnknown"),
    *("cudaErrorSystemNotReady", "cudaErrorContained", "cudaErrorMpsConnectionFailed", "cudaErrorMpsRpcFailure"),
    *("CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_UNKNOWN"),
    *("CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    *("CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR"),
)
OF_NCCL = "NCCL_ERROR_UNHANDLED_CUDA_ERROR"  # NCCL reports every CUDA error like this


def failure(error: BaseException, device: int) -> Failure | None:
    """Return what a CuPy error says about the device; None for any other error."""
    text = one_line(error)
    if isinstance(error, RuntimeError) and OF_NCCL in text:
        cause = _error_of(device)
        if cause is None:
            return Failure(
                f"NCCL has failed on device {device}, which still responds ({text}): it may need memory outside CuPy's "
                "pool, or a newer driver. NCCL_DEBUG=WARN shows more; reduce=host averages without NCCL",
                of_memory=False,
            )
        error, text = cause, one_line(cause)
    if isinstance(error, RuntimeError) and any(name in text for name in LOST):
        return Failure(
            f"device {device} has failed ({text}), and its pending work is lost: see the system log (dmesg, nvidia-smi "
            "-q), and resume from the last checkpoint, on other devices if this one does not recover",
            of_memory=False,
        )
    kinds = {kind.__name__ for kind in type(error).__mro__}
    of_the_pool = "OutOfMemoryError" in kinds
    if not of_the_pool and not (isinstance(error, RuntimeError) and any(name in text for name in NO_MEMORY)):
        return None
    asked = re.search(r"allocating ([\d,]+) bytes", text) if of_the_pool else None
    wanted = f"{amount(int(asked[1].replace(',', '')))} were requested" if asked else text
    there = pool(device)
    limit = "without a limit" if there.limit is None else f"of at most {amount(there.limit)} by {there.limited_by}"
    holds = f"its pool, {limit}, holds {amount(there.held)}, {amount(there.used)} of it in use"
    return Failure(
        f"device {device} has no memory left: {wanted}, and {holds}", of_memory=True, limited_by=there.limited_by
    )


def _error_of(device: int) -> BaseException | None:
    """Return the error that a harmless call on the device raises, or None."""
    import cupy

    try:
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.memGetInfo()
    except RuntimeError as error:
        return error
    return None
