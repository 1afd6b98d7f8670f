"""Updates of the flat weight vector from the flat gradient vector.

An optimizer sees `Params`, never layers: its state is flat vectors like the weights, and is averaged and saved like
them.
"""

from __future__ import annotations

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.checks import number
from cupynet.nn.params import Params
from cupynet.optim.schedules import Schedule, schedule


class Optimizer:
    """What all optimizers share: a learning rate, l2, clipping, and the walk over the segments of the weight vector.

    Args:
        learning_rate: a number or a `Schedule`.
        l2: the factor in the penalty l2/2 · |w|² on weights (not on biases), as its gradient l2 · w.
        max_grad_norm: the largest length of a gradient (of all weights together, without l2): a longer one is scaled
            down to it, so that a rare gradient that is far too long does not end training. None for no limit.

    Attributes:
        state: name -> flat (P,) vector; exists after `init`.
        recordable: whether `update` asks for the same operations in every step, with nothing of the host in them but
            its arguments: a GPU may record it then, and repeat what it has recorded. Not inherited.

    Raises:
        ConfigError: an argument cannot work.
    """

    recordable = False

    def __init__(self, learning_rate: float | Schedule, l2: float = 0.0, max_grad_norm: float | None = None) -> None:
        owner = type(self).__name__
        self.learning_rate = schedule(owner, learning_rate)
        self.l2 = number(f"{owner} l2", l2, minimum=0, below=1)
        self.max_grad_norm = (
            None
            if max_grad_norm is None
            else number(f"{owner} max_grad_norm", max_grad_norm, above=0, also=", or null")
        )
        self.state: dict[str, Array] = {}

    def init(self, params: Params, backend: Backend) -> None:
        """Make the state for these weights."""
        self.backend = backend
        self.state = {}

    def step(self, params: Params, iteration: int, squared_norm: Array | None = None) -> None:
        """Move the weights by the gradients, set the gradients to zero, and let the layers see the new weights.

        Args:
            squared_norm: of the whole gradient, which `max_grad_norm` limits, where `params` hold only a part of it;
                by default that of `params.grad`.
        """
        self.move(params, self.learning_rate(iteration), 1.0 / self.backend.loss_scale, squared_norm)

    def move(self, params: Params, rate: float, scale: float, squared_norm: Array | None = None) -> None:
        """What `step` does, at a learning rate and with a factor on the gradients.

        In a step that runs ahead of the host both are 1: operations know more, see `Recorder.steered`.
        """
        if self.max_grad_norm is not None:
            norm = self.backend.squared_norm(params.grad) if squared_norm is None else squared_norm
            self.backend.clip_norm(params.grad, norm, self.max_grad_norm / scale)
        published = True
        for segment in params.segments:
            part, l2 = slice(segment.start, segment.stop), self.l2 if segment.decay else 0.0
            published &= self.update(params, part, rate * segment.lr_scale, l2, scale) is True
        if not published:
            params.publish()

    def update(self, params: Params, part: slice, learning_rate: float, l2: float, grad_scale: float) -> bool | None:
        """Update one stretch of the vector; True where the copy that layers read of it (`params.stored`) is new too."""
        raise NotImplementedError


class SGD(Optimizer):
    """w -= lr · g."""

    recordable = True

    def update(self, params: Params, part: slice, learning_rate: float, l2: float, grad_scale: float) -> bool | None:
        master, grad = params.master[part], params.grad[part]
        self.backend.sgd_update(master, grad, learning_rate, l2, grad_scale, params.stored(part))
        return True


class Momentum(Optimizer):
    """v = mu · v - lr · g; w += v (Polyak 1964). The learning rate is inside the velocity.

    Args:
        learning_rate, l2, max_grad_norm: see `Optimizer`.
        momentum: mu.
    """

    nesterov, recordable = False, True

    def __init__(
        self,
        learning_rate: float | Schedule,
        momentum: float = 0.9,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, l2, max_grad_norm)
        self.momentum = number(f"{type(self).__name__} momentum", momentum, minimum=0, below=1)

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        velocity = backend.allocate(params.master.shape, params.master.dtype)
        velocity[...] = 0
        self.state = {"velocity": velocity}

    def update(self, params: Params, part: slice, learning_rate: float, l2: float, grad_scale: float) -> bool | None:
        master, velocity, grad = params.master[part], self.state["velocity"][part], params.grad[part]
        factors = learning_rate, self.momentum, l2, grad_scale
        self.backend.momentum_update(master, velocity, grad, *factors, self.nesterov, params.stored(part))
        return True


class Nesterov(Momentum):
    """v = mu · v - lr · g; w += mu · v - lr · g (Sutskever et al. 2013).

    Deeplearning4j's Nesterovs, torch's nesterov=True.

    Args:
        learning_rate, momentum, l2, max_grad_norm: see `Momentum`.
    """

    nesterov = recordable = True
