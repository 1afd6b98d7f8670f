"""A network with weights on a backend."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.errors import ConfigError
from cupynet.nn.context import INFERENCE, Context
from cupynet.nn.layer import Backward, Layer, Sequential
from cupynet.nn.loss import Loss, SoftmaxNLL
from cupynet.nn.params import Params
from cupynet.nn.types import Flat, InputType


class Model:
    """A network, its weights and its loss.

    Args:
        network: a description (see `Layer`); the model builds its own copy.
        input: what one example is.
        backend: where it computes.
        seed: of the initial weights.
        loss: what training makes small.

    Raises:
        ConfigError: the layers do not fit each other; the message names the one that does not.
    """

    def __init__(
        self, network: Layer, input: InputType, backend: Backend, seed: int = 123, loss: Loss | None = None
    ) -> None:
        self._description = network
        self.input, self.backend, self.seed = input, backend, seed
        self.loss = SoftmaxNLL() if loss is None else loss
        self.network = copy.deepcopy(network)
        self.params = Params()
        self.output = build(self.network, input, self.params, backend)
        check_loss(self.network, self.loss)
        self.params.allocate(backend, seed)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        """The raw output (logits) for x (N, ...), and the derivative."""
        return self.network.forward(x, context)

    def scores(self, x: Array) -> tuple[Array, Array]:
        """Probabilities and raw outputs of a batch x (N, ...) on the device, both (N, O) NumPy arrays."""
        raw, _ = self.forward(x, INFERENCE)
        logits = np.array(self.backend.to_host(raw), self.backend.policy.accumulate)
        scores = self.loss.scores(self.backend, raw)
        host = np.array(self.backend.to_host(scores), self.backend.policy.accumulate)
        self.backend.give_back(raw)
        return host, logits

    def predict(self, images: Any) -> Any:
        """Probabilities of images (N, H, W, C), uint8 or scaled to 0..1 already: (N, O), on the host.

        Raises:
            ConfigError: the images are not of this network's size, or whole numbers other than uint8.
        """
        if tuple(images.shape[1:]) != self.input.shape:
            raise ConfigError(f"images of shape {tuple(images.shape)}: this network takes N of {self.input.shape}")
        if images.dtype != np.uint8 and np.issubdtype(images.dtype, np.integer):
            raise ConfigError(f"images of {images.dtype}: must be uint8, or floating point scaled to 0..1")
        if len(images) == 0:
            return np.empty((0, *self.output.shape), self.backend.policy.accumulate)
        if images.dtype == np.uint8:
            x = self.backend.load_images(images, np.arange(len(images)))
        else:
            x = self.backend.asarray(images, self.backend.policy.storage)
        return self.scores(x)[0]

    def replicate(self, backend: Backend) -> Model:
        """The same network with the same weights on another backend."""
        replica = Model(self._description, self.input, backend, self.seed, self.loss)
        replica.load_weights(self.weights())
        return replica

    def weights(self) -> dict[str, Any]:
        """Name -> NumPy copy of the master weight, `conv1.weight` and so on."""
        return {name: np.array(self.backend.to_host(p.master)) for name, p in self.params.named()}

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Take over weights by name.

        Raises:
            ConfigError: a name is missing or unknown, or a shape differs.
        """
        named = dict(self.params.named())
        missing, unknown = sorted(named.keys() - weights.keys()), sorted(weights.keys() - named.keys())
        if missing or unknown:
            raise ConfigError(f"these weights are of another network: missing {missing}, unknown {unknown}")
        for name, p in named.items():
            if tuple(weights[name].shape) != p.shape:
                raise ConfigError(
                    f"weight '{name}' has shape {tuple(weights[name].shape)}, this network needs {p.shape}"
                )
        for name, p in named.items():
            p.master[...] = self.backend.asarray(weights[name], p.master.dtype)
        self.params.publish()

    def summary(self) -> str:
        """A table of layers with their output shapes and numbers of weights."""
        layers = self.network.layers if isinstance(self.network, Sequential) else {"network": self.network}
        types = self.network.types if isinstance(self.network, Sequential) else {"network": (self.input, self.output)}
        rows = [("layer", "kind", "settings", "output", "parameters"), ("input", "", "", str(self.input), "")]
        for name, layer in layers.items():
            prefix = f"{name}." if isinstance(self.network, Sequential) else ""
            count = sum(p.size for full, p in self.params.named() if full.startswith(prefix))
            rows.append((name, type(layer).__name__, layer.describe(), str(types[name][1]), f"{count:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, f"total {self.params.count:,} parameters"])


def build(network: Layer, input: InputType, params: Params, backend: Backend) -> InputType:
    """Infer all shapes of `network` and declare its weights; allocates nothing, so a configuration can be checked with
    it.
    """
    network.needs_dx = False  # nobody asks for the derivative by the images
    return network.build(input, params.scope(), backend)


def check_loss(network: Layer, loss: Loss) -> None:
    """Refuse a softmax under a loss that applies softmax itself."""
    last = ("network", network)
    while isinstance(last[1], Sequential):
        last = list(last[1])[-1]
    activation = getattr(last[1], "activation", getattr(last[1], "name", ""))
    if isinstance(loss, SoftmaxNLL) and activation == "softmax":
        raise ConfigError(
            f"layer '{last[0]}' has activation softmax, but SoftmaxNLL applies softmax itself: use activation identity"
        )


def check_output(output: InputType, classes: int, name: str = "output") -> None:
    """Refuse a network whose output is not one logit per class."""
    if not isinstance(output, Flat) or output.features != classes:
        raise ConfigError(
            f"layer '{name}' gives {output}, but the data has {classes} classes: end in Dense(units={classes})"
        )
