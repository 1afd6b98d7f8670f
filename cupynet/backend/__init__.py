"""Array backends: a reference implementation of every operation, and accelerated versions for CPUs and GPUs."""

from cupynet.backend.backend import Backend
from cupynet.backend.controls import Control, Scaling
from cupynet.backend.device import Device
from cupynet.backend.environment import available_cores, cpu_model, environment, memory, usable_cores
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.select import create_backend, device_count, select_backend
from cupynet.backend.transfer import FRACTIONS, HostData, PixelScale, Shared, Transfer
from cupynet.backend.update_rules import RULES, Layers, Rule, UpdateScalars
from cupynet.backend.window import Window
from cupynet.backend.workspace import Workspace
from cupynet.core.shared_options import BACKENDS, DTYPES

__all__ = [
    "BACKENDS",
    "DTYPES",
    "RULES",
    "FRACTIONS",
    "Backend",
    "Control",
    "Convolution",
    "Device",
    "DtypePolicy",
    "HostData",
    "Layers",
    "UpdateScalars",
    "FusedPair",
    "PixelScale",
    "Rule",
    "Scaling",
    "Shared",
    "Transfer",
    "Window",
    "Workspace",
    "available_cores",
    "cpu_model",
    "create_backend",
    "device_count",
    "environment",
    "memory",
    "select_backend",
    "usable_cores",
]
