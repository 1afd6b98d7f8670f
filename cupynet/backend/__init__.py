"""Arrays: the hot operations once as a reference, and the backends that do them faster."""

from cupynet.backend.base import Backend, Pad, out_size
from cupynet.backend.environment import available_cores, cpu_model, environment
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.select import create_backend, device_count, select_backend
from cupynet.backend.workspace import Workspace
from cupynet.checks import BACKENDS, DTYPES

__all__ = [
    "BACKENDS",
    "DTYPES",
    "Backend",
    "DtypePolicy",
    "Pad",
    "Workspace",
    "available_cores",
    "cpu_model",
    "create_backend",
    "device_count",
    "environment",
    "out_size",
    "select_backend",
]
