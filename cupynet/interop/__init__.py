"""Import of weights from PyTorch and Keras, and export of models to PyTorch and ONNX."""

from cupynet.interop.keras import import_keras
from cupynet.interop.onnx import BOUND, difference, export_onnx, onnx_graph
from cupynet.interop.torch import export_torch, import_torch, torch_source

__all__ = [
    "BOUND",
    "difference",
    "export_onnx",
    "export_torch",
    "import_keras",
    "import_torch",
    "onnx_graph",
    "torch_source",
]
