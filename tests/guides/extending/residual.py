"""A layer: a convolution with a skip connection."""

from cupynet import Conv2D, Layer


class Residual(Layer):
    """y = x + relu(conv(x)), of the same height, width and channels as x: (N, H, W, C) -> (N, H, W, C)."""

    def __init__(self, kernel_size: int = 3) -> None:
        self.kernel_size = kernel_size

    def build(self, input, params, backend):
        self.branch = Conv2D(input.channels, self.kernel_size, padding="same", activation="relu")
        return self.branch.build(input, params.scope("branch"), backend)

    def forward(self, x, context):
        around, branch_backward = self.branch.forward(x, context)

        def backward(dy):
            dx = branch_backward(dy.copy())  # it may overwrite its argument
            return dy if dx is None else dy + dx

        return x + around, backward
