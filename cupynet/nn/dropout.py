from __future__ import annotations

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.backend.philox import key_of
from cupynet.core import checks
from cupynet.nn.context import Context
from cupynet.nn.layer import Backward, Layer, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import InputType


class Dropout(Layer):
    """Inverted dropout (Srivastava et al. 2014): x becomes 0 with probability `rate`, otherwise x / (1 - rate).

    The mask depends only on the model's seed, the epoch, the sample, the layer's name and the position in the sample,
    so it is the same on every backend, with any number of workers and after a resume. In Deeplearning4j, the argument
    is instead the probability of keeping a value.
    """

    capturable = True
    uses_rng = True

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = checks.number("Dropout rate", rate, minimum=0, below=1)

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        return input

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        if not context.train:
            return x, no_backward
        if not self.rate:
            return x, lambda dy: dy
        backend, key, epoch = self.backend, key_of(context.seed, self.path), context.epoch
        numbers = backend.xp.arange(len(x)) if context.samples is None else context.samples
        samples = backend.asarray(numbers)
        y = backend.dropout(x, samples, epoch, key, self.rate)

        def backward(dy: Array) -> Array | None:
            return backend.dropout(dy, samples, epoch, key, self.rate, out=dy)

        return y, backward
