"""A layer: a weight for each feature."""

from cupynet import Layer
from cupynet.nn import Constant


class Scale(Layer):
    """Multiplies each feature by a learned factor: (N, ...) -> (N, ...)."""

    def build(self, input, params, backend):
        self.factor = params.add("factor", input.shape, Constant(1.0))
        return input

    def forward(self, x, context):
        def backward(dy):
            self.factor.grad[...] += (dy * x).sum(axis=0)
            return dy * self.factor.data

        return x * self.factor.data, backward
