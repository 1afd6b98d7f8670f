"""A layer: a convolution with a way around it."""

from cupynet import Conv2D, Layer
from cupynet.nn import no_backward


class Residual(Layer):
    """y = x + relu(conv(x)), of the same height, width and channels as x: (N, H, W, C) -> (N, H, W, C)."""

    def __init__(self, kernel: int = 3) -> None:
        self.kernel = kernel

    def build(self, input, params, backend):
        self.branch = Conv2D(input.channels, self.kernel, padding="same", activation="relu")
        return self.branch.build(input, params.scope("branch"), backend)

    def forward(self, x, context):
        backend = self.backend
        around, branch_backward = self.branch.forward(x, context)
        y = backend.borrow(x.shape)
        y[...] = x
        y += around  # not the other way round: the branch's own derivative still reads what it returned

        def backward(dy):
            through = backend.borrow(dy.shape)  # both ways need a gradient of their own
            through[...] = dy
            dx = branch_backward(through)
            if dx is not None:
                dy += dx
            return dy

        return y, backward if context.train else no_backward
