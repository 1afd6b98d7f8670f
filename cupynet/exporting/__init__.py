"""A trained model for other programs: as an ONNX graph, as PyTorch's weights and the module that takes them.

`python -m cupynet.export` does this to a run.
"""

from cupynet.exporting.onnx_check import BOUND, Difference, difference
from cupynet.exporting.onnx_graph import INPUTS, export_onnx, onnx_graph
from cupynet.exporting.torch_source import torch_source
from cupynet.exporting.torch_weights import export_torch

__all__ = ["BOUND", "INPUTS", "Difference", "difference", "export_onnx", "export_torch", "onnx_graph", "torch_source"]
