"""Layers, losses and models."""

from cupynet.nn.branches import Concat, Residual
from cupynet.nn.context import INFERENCE, Context
from cupynet.nn.conv import Conv2D
from cupynet.nn.dense import Activation, Dense, Flatten
from cupynet.nn.dropout import Dropout
from cupynet.nn.init import Constant, Normal, Orthogonal, TruncatedNormal, Uniform, VarianceScaling
from cupynet.nn.layer import Backward, Layer, Sequential, no_backward
from cupynet.nn.loss import BinaryCrossEntropy, Hinge, Huber, Loss, MeanSquaredError, SoftmaxNLL
from cupynet.nn.model import Model, check_loss, check_output
from cupynet.nn.norm import BatchNorm, LayerNorm
from cupynet.nn.params import Buffer, Parameter, Params, Scope, Segment
from cupynet.nn.pool import AvgPool2D, GlobalAvgPool2D, MaxPool2D
from cupynet.nn.types import Flat, Image, InputType, input_type

__all__ = [
    "INFERENCE",
    "Activation",
    "AvgPool2D",
    "Backward",
    "BatchNorm",
    "BinaryCrossEntropy",
    "Buffer",
    "Concat",
    "Context",
    "Conv2D",
    "Dense",
    "Dropout",
    "Constant",
    "Flat",
    "Flatten",
    "GlobalAvgPool2D",
    "Hinge",
    "Huber",
    "Image",
    "InputType",
    "Layer",
    "LayerNorm",
    "Loss",
    "MaxPool2D",
    "MeanSquaredError",
    "Model",
    "Normal",
    "Orthogonal",
    "Parameter",
    "Params",
    "Residual",
    "Scope",
    "Segment",
    "Sequential",
    "SoftmaxNLL",
    "TruncatedNormal",
    "Uniform",
    "VarianceScaling",
    "check_loss",
    "check_output",
    "no_backward",
    "input_type",
]
