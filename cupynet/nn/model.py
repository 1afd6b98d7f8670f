from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.backend import FRACTIONS, Backend, create_backend, select_backend
from cupynet.backend.array import Array, layout_hint
from cupynet.core import checks, wording
from cupynet.core.described import check_unchanged, describe
from cupynet.core.errors import ConfigError
from cupynet.core.files import PathLike, read_weights, save_described
from cupynet.core.notebook import html_table
from cupynet.nn.context import INFERENCE, Context
from cupynet.nn.inputs import as_images, is_floating, range_warning
from cupynet.nn.layer import TRAINABLE, Backward, KerasAttribute, Layer, Sequential
from cupynet.nn.loss import Loss, loss_of
from cupynet.nn.params import Params, Unmatched, weight_array
from cupynet.nn.summary import aligned, layer_rows, totals
from cupynet.nn.types import Flat, InputType, input_type

BATCH_SIZE = 256  # default batch size of `predict`, `classify` and `scores`

log = logging.getLogger(__name__)


class Model:
    """A network, its weights and its loss.

        model = Model([Conv2D(20, 5), MaxPool2D(2), Dense(10)], input=(28, 28, 1))

    `predict`, `classify`, `scores` and `weights` are thread-safe, even during a fit. Other methods are not.

    Args:
        network: a list of layers, a mapping from name to layer, or one layer. It is copied.
        input: the shape of an image, (H, W, C), or (H, W) for one channel; or an `Image` or `Flat`.
        backend: numpy, numba, cupy, auto for the fastest available, or a `Backend`.
        seed: seed of the initial weights, below 2**64.
        loss: softmax, mean_squared_error, binary_cross_entropy, hinge, huber, or a `Loss`.
        dtype: half, bfloat16, float (default) or double. If `backend` is a `Backend`, omit it.
        needs_dx: True to compute the gradient with respect to the input, as for all pipeline stages but the first.

    Attributes:
        network: the built copy of the network.
        pixels: the scaling of pixels (0 to 255) in the last training run.
        trained_on: `pixels` for uint8 images, `floats` for scaled images, "" for new and imported weights.
    """

    compile = fit = train_on_batch = evaluate = KerasAttribute(
        "a Model does not train itself. Use `with ParallelWrapper(model, workers=1, optimizer=Adam(0.001)) as wrapper: "
        "wrapper.fit(x, y, epochs=5)`, and wrapper.evaluate(x, y)"
    )
    trainable = TRAINABLE

    def __init__(
        self,
        network: Layer | Mapping[str, Layer] | Iterable[Layer],
        input: InputType | Sequence[int],
        backend: Backend | str = "auto",
        seed: int = 123,
        loss: Loss | str = "softmax",
        *,
        dtype: str | None = None,
        needs_dx: bool = False,
    ) -> None:
        network = network if isinstance(network, Layer) else Sequential(network)
        if built := next((layer for layer in network.walk() if "backend" in vars(layer)), None):
            raise ConfigError(
                f"{built.path or 'this network'} belongs to another model. Use new layers, or `Model.replace`",
                "network",
            )
        self._description = copy.deepcopy(network)
        self.input = input = input_type(input)
        self.backend = backend = _backend_of(backend, dtype)
        self.seed = checks.seed("seed", seed)
        self.loss = loss_of(loss)
        self.network, self._needs_dx = copy.deepcopy(self._description), needs_dx
        self.params, self.pixels = Params(), FRACTIONS
        self.trained_on, self._warned = "", False
        self._class_names: tuple[str, ...] = ()
        self.output = self.network.build(input, self.params.scope(needs_dx=needs_dx), backend)
        check_loss(self.network, self.loss)
        if isinstance(self.output, Flat):
            self.loss.check(self.output.features)
        self.params.allocate(backend, self.seed)

    @property
    def _specification(self) -> Layer:
        """The network without weights. Raise ConfigError if an argument of a built layer was changed."""
        for layer in self.network.walk():
            check_unchanged(layer, layer.path)
        return self._description

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        """Return the raw output (logits) for x (N, ...), and the backward function."""
        if tuple(x.shape[1:]) != self.input.shape:
            hint = layout_hint(x.shape, self.input.shape)
            raise ConfigError(f"batch of shape {tuple(x.shape)}: expected N samples of shape {self.input.shape}{hint}")
        with self.backend.activated():
            x = self.backend.compact(x)
            y, derivative = self.network.forward(x, context)

        def backward(dy: Array) -> Array | None:
            gradients = [dy]  # see `Sequential`
            del dy
            with self.backend.activated():
                dx = derivative(gradients.pop())
                self.params.clear_frozen(self.params.grad)
                return dx

        return y, backward

    def scores(self, x: Array, batch_size: int = BATCH_SIZE) -> tuple[Array, Array]:
        """Return scores and raw outputs, each (N, O) on the host, for floating-point x (N, ...)."""
        size = checks.integer("batch_size", batch_size, 1)
        if not isinstance(x, self.backend.xp.ndarray):
            x = self.backend.asarray(x)
        if not is_floating(x):
            raise ConfigError(f"batch of type {x.dtype} must be floating point. Use `predict` for uint8 images")
        return self._together([self._scores(x[start : start + size]) for start in range(0, len(x), size)])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of the outputs; empty if unknown. Can be set to one name per output, or to None."""
        return self._class_names

    @class_names.setter
    def class_names(self, names: Iterable[object] | None) -> None:
        try:
            found = () if names is None else tuple(map(str, names))
        except TypeError:  # not iterable
            found = None
        if found is None or isinstance(names, str | set | frozenset) or len(found) not in (0, self.output.features):
            outputs = wording.counted(self.output.features, "output")
            raise ConfigError(f"must have one name for each of {outputs}", "class_names", wording.shown(names))
        self._class_names = found

    def predict(self, images: Any, batch_size: int = BATCH_SIZE) -> Any:
        """Return scores (N, O) on the host; probabilities if the loss defines them.

        Args:
            images: (N, H, W, C), or (N, H, W) for one channel. The axis N may be omitted for a single image. Integers
                from 0 to 255 are scaled by `pixels`; floating-point images must already be scaled. A warning is logged
                if their range differs greatly from the training images'.
        """
        size = checks.integer("batch_size", batch_size, 1)
        images = as_images(images, self.input.shape, self.backend.xp)
        if not self._warned and (warning := range_warning(images, self.trained_on, self.pixels)):
            self._warned = True
            log.warning("predict: %s", warning)
        parts = []
        for start in range(0, len(images), size):
            batch = images[start : start + size]
            if images.dtype == np.uint8:
                x = self.backend.load_images(batch, np.arange(len(batch)), self.pixels)
            else:
                x = self.backend.asarray(batch, self.backend.policy.storage)
            parts.append(self._scores(x))  # `forward` copies non-contiguous arrays
        return self._together(parts)[0]

    def classify(self, images: Any, top: int = 1, batch_size: int = BATCH_SIZE) -> list[list[tuple[int | str, float]]]:
        """Return the `top` classes with the highest scores for each image, highest first, as (class, score).

        The class is a name, or an index if there are no names. The score is a probability if the loss defines one.

        Raises:
            ConfigError: the model has no output for each class, or `top` is above the number of classes.
        """
        outputs = self.output.features
        if self.output != Flat(outputs) or outputs == 1:
            found = "a single output" if outputs == 1 else f"the output {self.output}"
            raise ConfigError(f"classify needs one output per class, but this model has {found}. Use predict")
        top = checks.integer("top", top, 1, most=outputs, why=f"there are {outputs} classes")
        scores = self.predict(images, batch_size)  # (N, O)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top]  # (N, top)
        names = self.class_names or range(outputs)
        return [[(names[i], float(row[i])) for i in best.tolist()] for best, row in zip(order, scores, strict=True)]

    def _scores(self, x: Array) -> tuple[Array, Array]:
        backend, accumulate = self.backend, self.backend.policy.accumulate
        with backend.activated(), backend.subnormals_as_zero():
            raw, _ = self.forward(x, INFERENCE)
            if backend.data_ptr(raw) == backend.data_ptr(x):  # a network such as `Flatten` returns its input
                raw = raw.copy()
            logits = np.array(backend.to_host(raw), accumulate)
            found = self.loss.scores(backend, raw)
            if getattr(found, "shape", None) != logits.shape:
                got, kind = getattr(found, "shape", type(found).__name__), type(self.loss).__name__
                raise ConfigError(f"scores must return an array of {logits.shape}, got {got}", "loss", kind)
            scores = np.array(backend.to_host(found), accumulate)
        if self.loss.applies == "softmax" and backend.policy.storage != accumulate:
            scores /= scores.sum(axis=-1, keepdims=True)  # 1 only up to rounding errors in 16 bits
        return scores, logits

    def _together(self, parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        nothing = np.empty((0, *self.output.shape), self.backend.policy.accumulate)
        scores, logits = (np.concatenate([part[i] for part in parts] or [nothing]) for i in (0, 1))
        return scores, logits

    def replicate(self, backend: Backend) -> Model:
        """Return a copy of the model on another backend."""
        loss = checks.copied("loss", self.loss)
        replica = Model(self._specification, self.input, backend, self.seed, loss, needs_dx=self._needs_dx)
        replica.restore_weights(self.weights())
        replica.pixels, replica.class_names = self.pixels, self.class_names
        replica.trained_on = self.trained_on
        replica.set_learning_rate_factors(self.params.rates)
        return replica

    def part(self, names: Sequence[str], backend: Backend) -> Model:
        """Return consecutive layers of this `Sequential` network as a pipeline stage, with their names and weights.

        Only the last stage has the loss. The first stage does not compute the gradient with respect to its input.
        """
        layers = dict(self._specification.children())
        whole = dict(self.network.children())
        last = names[-1] == list(whole)[-1]
        part = Model(
            Sequential({name: layers[name] for name in names}),
            whole[names[0]].input,
            backend,
            self.seed,
            checks.copied("loss", self.loss) if last else Loss(),
            needs_dx=names[0] != next(iter(whole)),
        )
        weights = self.weights()
        part.restore_weights({name: weights[name] for name in part.weights()})
        own = part.params.places
        part.set_learning_rate_factors({name: rate for name, rate in self.params.rates.items() if name in own})
        return part

    def replace(self, **layers: Layer) -> Model:
        """Return a copy with some layers replaced, for instance to fine-tune: `model.replace(dense2=Dense(3))`.

        The remaining layers keep their weights. All layers are trainable, even those frozen in this model. The class
        names are kept unless the last layer is replaced.

        Raises:
            ConfigError: the network is not a `Sequential`, has no layer with a given name, or another layer's weights
                no longer fit.
        """
        parts = dict(self._specification.children()) if isinstance(self.network, Sequential) else {}
        if unknown := layers.keys() - parts.keys():
            raise ConfigError(f"there is no layer {min(unknown)}. Layers: {', '.join(parts)}", "layers")
        backend = self.backend
        backend = create_backend(backend.name, backend.policy.name, backend.device, **backend.options)
        model = Model(parts | layers, self.input, backend, self.seed, self.loss, needs_dx=self._needs_dx)
        kept = {name: weight for name, weight in self.weights().items() if name.partition(".")[0] not in layers}
        if kept and (unfit := model.load_weights(kept, strict=False).unexpected):
            raise ConfigError(f"{unfit[0]} no longer fits. Replace its layer too", "layers")
        model.pixels, model.trained_on = self.pixels, self.trained_on
        if next(reversed(parts)) not in layers and model.output == self.output:
            model.class_names = self.class_names
        return model

    def weights(self) -> dict[str, Any]:
        """Return NumPy copies of all weights and buffers by name, such as `conv1.weight` and `norm1.mean`."""
        return {name: np.array(self.backend.to_host(array)) for name, array in self.params.arrays().items()}

    def load_weights(self, weights: Mapping[str, Any] | PathLike | Model, *, strict: bool = True) -> Unmatched:
        """Load weights and buffers by name, from a mapping, another model, or a safetensors file.

        Args:
            strict: False to load only weights with matching names and shapes, for instance before fine-tuning.

        Returns:
            The names that do not match; none if `strict`.

        Raises:
            ConfigError: a name or shape differs (if `strict`), nothing matches, or a value is not a finite array.
                Nothing is loaded.
            DataError: the file cannot be read.
        """
        if isinstance(weights, Model):
            weights = weights.weights()
        elif not isinstance(weights, Mapping):
            kinds = "a mapping of names to arrays, a Model, or the path of a safetensors file"
            if not isinstance(weights, str | os.PathLike):
                raise ConfigError(f"must be {kinds}, not {wording.one(type(weights).__name__)}", "weights")
            weights = read_weights(weights)
        weights = {name: weight_array(name, each) for name, each in weights.items()}
        if strict:
            self.params.check_fit(weights)
        unmatched = self.params.unmatched(weights)
        fitting = {name: weights[name] for name in weights.keys() - set(unmatched.unexpected)}
        self.restore_weights(fitting)
        return unmatched

    def restore_weights(self, weights: Mapping[str, Any]) -> None:
        """Load weights and buffers by name without checking them."""
        arrays = self.params.arrays()
        with self.backend.activated():
            for name, weight in weights.items():
                arrays[name][...] = self.backend.asarray(weight, arrays[name].dtype)
        self.params.publish()

    def save(self, path: PathLike) -> None:
        """Save the model to a safetensors file: layers, loss, weights, pixel scale and class names.

            model.save("digits.safetensors")
            model = cupynet.load("digits.safetensors")

        Raises:
            ConfigError: the name does not end in .safetensors; a weight is not finite; a layer has an argument that is
                not a plain value, or is defined in a function or in __main__.
            OutputError: the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike) or Path(path).suffix.lower() != ".safetensors":
            raise ConfigError("must end in .safetensors, the format of this file", "path", wording.shown(path, str))
        weights = self.weights()
        self.params.unmatched(weights)  # raises for values that `load` refuses
        save_described(path, weights, self.description())

    def description(self) -> dict[str, Any]:
        """Return everything that `save` writes except the weights, as plain values."""
        return {
            "network": describe(self._specification),
            "loss": describe(self.loss),
            "input": list(self.input.shape),
            "dtype": self.backend.policy.name,
            "seed": self.seed,
            "normalize": self.pixels.normalization(),
            "class_names": list(self.class_names),
            "trained_on": self.trained_on,
            "learning_rate_factors": self.params.rates,
        }

    def __getstate__(self) -> dict[str, Any]:
        backend = self.backend
        return {
            "arguments": (self._specification, self.input, self.seed, self.loss, self._needs_dx),
            "backend": (backend.name, backend.policy.name, backend.device, backend.options),
            "weights": self.weights(),
            "rates": self.params.rates,
            "more": {name: getattr(self, name) for name in ("pixels", "class_names", "trained_on")},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        network, input, seed, loss, needs_dx = state["arguments"]
        name, dtype, device, options = state["backend"]
        backend = create_backend(name, dtype, device, **options)
        Model.__init__(self, network, input, backend, seed, loss, needs_dx=needs_dx)
        self.restore_weights(state["weights"])
        self.set_learning_rate_factors(state["rates"])
        for name, value in state["more"].items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        heading, *rows = self.rows()
        return html_table(heading, rows, totals(self.network, self.params))

    def set_learning_rate_factors(self, factors: Mapping[str, float]) -> None:
        """Set the learning-rate factors of some weights, for fine-tuning.

            model.set_learning_rate_factors({"conv*": 0.1, "conv1": 0})

        Keys are `fnmatch` patterns of layer or weight names; the last matching pattern applies. Factors are at least 0.
        Weights with factor 0 are frozen, and a frozen `BatchNorm` uses its running statistics. Call this before
        creating the `ParallelWrapper`. The factors are saved with the model.
        """
        if not isinstance(factors, Mapping):
            raise ConfigError("must be a dictionary {pattern: factor}", "factors", wording.shown(factors))
        rates = dict(self.params.rates)
        for pattern, factor in factors.items():
            rate = checks.number(f"factors[{pattern!r}]", factor, minimum=0)
            rates |= dict.fromkeys(self.params.matching([pattern]), rate)
        self.params.set_rates(rates)
        if isinstance(self.network, Sequential) and not self._needs_dx:
            self.network.train_only({name.partition(".")[0] for name in self.params.places if rates.get(name, 1.0)})

    def freeze(self, *patterns: str) -> None:
        """Freeze weights: set their learning-rate factor to 0, as in `model.freeze("conv*")`."""
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"freeze needs layer names, such as 'conv*', got {wording.shown(patterns)}")
        self.set_learning_rate_factors(dict.fromkeys(patterns, 0.0))

    def unfreeze(self, *patterns: str) -> None:
        """Set the learning-rate factor of these weights, by default of all weights, to 1."""
        self.set_learning_rate_factors(dict.fromkeys(patterns or ("*",), 1.0))

    def summary(self) -> str:
        """Return a table of layers: output shape and bytes, parameters, and multiply-adds per sample."""
        return f"{aligned(self.rows())}\n{totals(self.network, self.params)}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the summary, header first."""
        return layer_rows(self.network, self.input, self.backend.policy.storage.itemsize)


def _backend_of(backend: Backend | str, dtype: str | None) -> Backend:
    if isinstance(backend, str):
        name, _ = select_backend(backend)
        return create_backend(name, dtype or "float")
    checks.instance("backend", backend, Backend, "create_backend('numba'), or its name")
    if dtype is not None and dtype != backend.policy.name:
        raise ConfigError(f"the backend already has dtype {backend.policy.name}. Remove this argument", "dtype", dtype)
    return backend


def check_loss(network: Layer, loss: Loss) -> None:
    """Raise ConfigError if both the network and the loss apply softmax or sigmoid."""
    last = network.output_activation
    if loss.applies is not None and last in ("softmax", "sigmoid"):
        raise ConfigError(
            f"the last layer has activation {last}, but {type(loss).__name__} applies {loss.applies} itself. Use "
            "activation identity"
        )


def check_output(network: Layer, classes: int) -> None:
    """Raise ConfigError unless the built network has as many outputs as there are classes or targets."""
    if not isinstance(network.output, Flat):
        raise ConfigError(
            f"the network returns {network.output}, not one number per class or target. End it with a Dense layer"
        )
    if network.output != Flat(classes):
        outputs = network.output.features
        more = f", or if the data are arrays, set {wording.setting('data', 'classes', outputs)}" * (outputs > classes)
        raise ConfigError(
            f"the network returns {network.output}, but the data have {wording.counted(classes, 'class')} or targets. "
            f"Give its last layer units={classes}{more}"
        )
