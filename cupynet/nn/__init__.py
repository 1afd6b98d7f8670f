"""Networks from scratch: layers whose forward pass returns its own derivative, weights in one flat vector."""

from cupynet.nn.context import INFERENCE, Context
from cupynet.nn.conv import Conv2D
from cupynet.nn.dense import Activation, Dense, Flatten
from cupynet.nn.layer import Backward, Layer, Sequential, no_backward
from cupynet.nn.loss import BinaryCrossEntropy, Hinge, Huber, Loss, MeanSquaredError, SoftmaxNLL
from cupynet.nn.model import Model, build, check_loss, check_output
from cupynet.nn.params import Parameter, Params, Scope, Segment
from cupynet.nn.pool import MaxPool2D
from cupynet.nn.types import Flat, Image, InputType

__all__ = [
    "INFERENCE",
    "Activation",
    "Backward",
    "BinaryCrossEntropy",
    "Context",
    "Conv2D",
    "Dense",
    "Flat",
    "Flatten",
    "Hinge",
    "Huber",
    "Image",
    "InputType",
    "Layer",
    "Loss",
    "MaxPool2D",
    "MeanSquaredError",
    "Model",
    "Parameter",
    "Params",
    "Scope",
    "Segment",
    "Sequential",
    "SoftmaxNLL",
    "build",
    "check_loss",
    "check_output",
    "no_backward",
]
