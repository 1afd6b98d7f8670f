"""scikit-learn estimators, for pipelines, cross-validation and grid search.

    from cupynet.sklearn import Classifier  # or Regressor
    from sklearn.model_selection import GridSearchCV

    classifier = Classifier([Conv2D(20, 5), MaxPool2D(2), Dense(100, activation="relu")], input=(28, 28, 1))
    search = GridSearchCV(classifier, {"workers": [1, 2], "averaging_frequency": [1, 10]}).fit(x, y)

Requires `pip install 'cupynet[sklearn]'`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown
from cupynet.data import Dataset, Loader
from cupynet.nn import Dense, Layer, Model, Sequential, input_type
from cupynet.optim import Adam, Optimizer, optimizer_of
from cupynet.training import Callback, ParallelWrapper
from cupynet.training.parallel_wrapper import CTRL_C

Layers = Sequence[Layer] | Mapping[str, Layer]


class _Network(BaseEstimator):  # type: ignore[misc]
    def __init__(
        self,
        layers: Layers | None = None,
        input: tuple[int, ...] | None = None,
        *,
        epochs: int = 20,
        batch_size: int = 32,
        workers: int | None = 1,
        averaging_frequency: int | str = 3,
        optimizer: Optimizer | str | None = None,
        learning_rate: Any = None,
        validation_split: float = 0.0,
        callbacks: Sequence[Callback] = (),
        backend: str = "auto",
        dtype: str = "float",
        random_state: Any = 0,
        progress: str = "none",
    ) -> None:
        self.layers = layers
        self.input = input
        self.epochs = epochs
        self.batch_size = batch_size
        self.workers = workers
        self.averaging_frequency = averaging_frequency
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.validation_split = validation_split
        self.callbacks = callbacks
        self.backend = backend
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress

    def _fit(self, images: NDArray[Any], targets: NDArray[Any], outputs: int, loss: str, weights: Any) -> None:
        layers = [Dense(100, activation="relu")] if self.layers is None else self.layers
        hidden = dict(layers) if isinstance(layers, Mapping) else dict(Sequential(layers)) if layers else {}
        if "output" in hidden:
            raise ConfigError("the estimator adds a layer `output`. Rename your layer", "layers")
        last = next(reversed(hidden.values()), None)
        if isinstance(last, Dense) and (last.units, last.activation) == (outputs, "identity"):
            raise ConfigError(f"the estimator adds the output layer. Remove Dense({outputs})", "layers")
        seed = int(check_random_state(self.random_state).randint(1 << 31))
        network = {**hidden, "output": Dense(outputs)}
        try:
            self.model_ = Model(network, images.shape[1:], self.backend, seed, loss, dtype=self.dtype)
        except ConfigError as error:
            if error.setting or self.input is not None or images.shape[1] > 1:
                raise
            hint = "If each row of X is an image, pass its shape, such as input=(28, 28, 1)"
            raise ConfigError(f"{error}. {hint}", "input") from error
        optimizer = Adam(0.003) if self.optimizer is None else optimizer_of(self.optimizer)
        if self.learning_rate is not None:
            optimizer = copy.copy(optimizer)
            optimizer.learning_rate = self.learning_rate
        if weights is not None:
            weights = _check_sample_weight(weights, images, ensure_non_negative=True)
        data = Dataset("X", images, targets, outputs, weights=weights)
        with ParallelWrapper(
            self.model_,
            self.workers,
            self.averaging_frequency,
            optimizer=optimizer,
            callbacks=self.callbacks,
            progress=self.progress,
            log_every=0,
        ) as wrapper:
            needing = next((each for each in wrapper.callbacks if each.needs_validation), None)
            if needing is not None and not self.validation_split:
                reason = f"must be above 0, such as 0.1, because {type(needing).__name__} needs validation images"
                raise ConfigError(reason, "validation_split", shown(self.validation_split))
            loader = Loader(data, self.batch_size, seed)
            self.history_ = wrapper.fit(loader, epochs=self.epochs, validation_split=self.validation_split)
            if wrapper.trainer.stopped is not None and wrapper.trainer.stopped.text == CTRL_C:
                raise KeyboardInterrupt  # also in IPython, to stop a grid search
        self.n_iter_ = len(self.history_.epochs.get("epoch", []))

    def _scores(self, X: Any) -> NDArray[Any]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, allow_nd=True, dtype="numeric")
        found: NDArray[Any] = self.model_.predict(self._images(X))
        return found

    def _images(self, X: NDArray[Any]) -> NDArray[Any]:
        """Convert samples to images (S, H, W, C), integers or float32."""
        images = X.ndim > 2 or self.input is not None
        if self.input is not None:
            shape = input_type(self.input).shape
            if math.prod(shape) != math.prod(X.shape[1:]):
                raise ConfigError(f"does not match samples of shape {X.shape[1:]}", "input", str(self.input))
            X = X.reshape(len(X), *shape)
        if X.ndim == 2:
            X = X[:, None, :, None]  # each sample becomes a row of pixels
        elif X.ndim == 3:
            X = X[..., None]
        return X if images and X.dtype.kind in "iu" else X.astype(np.float32)


class Classifier(ClassifierMixin, _Network):  # type: ignore[misc]
    """A classifier, trained with data parallelism.

    Integer images (S, H, W) or (S, H, W, C) are pixels from 0 to 255. Other data must be scaled, for example with
    `StandardScaler`.

    Args:
        layers: hidden layers, by default `Dense(100, "relu")`. An output layer is added.
        input: shape to which flat samples are reshaped, such as (28, 28, 1); by default the shape in X.
        epochs, batch_size, validation_split: see `ParallelWrapper.fit`.
        workers, averaging_frequency, callbacks, progress: see `ParallelWrapper`.
        optimizer: an `Optimizer` or its name; Adam(0.003) by default.
        learning_rate: a rate or schedule, such as 0.01 or "cosine", that replaces the optimizer's.
        backend, dtype: see `Model`.
        random_state: as in scikit-learn; seeds the weights and the order of samples.

    Attributes:
        classes_: labels in the order of the outputs, (O,).
        model_: the trained `Model`.
        history_: the history of the fit.
        n_iter_: number of epochs.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:
        """Train on X (S, F), (S, H, W) or (S, H, W, C), and labels y (S,) of any type."""
        X, y = validate_data(self, X, y, allow_nd=True, dtype="numeric", ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        self._fit(self._images(X), numbers, max(len(self.classes_), 2), "softmax", sample_weight)
        self.model_.class_names = self.classes_ if len(self.classes_) > 1 else ()
        return self

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return class probabilities, (N, O), in the order of `classes_`."""
        scores = self._scores(X)[:, : len(self.classes_)]
        scores /= scores.sum(axis=1, keepdims=True)  # a single class has two outputs
        return scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label of each sample, (N,)."""
        scores = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[scores.argmax(axis=1)]
        return found


class Regressor(RegressorMixin, _Network):  # type: ignore[misc]
    """A regressor that minimizes the mean squared error, trained with data parallelism.

    See `Classifier` for the arguments and attributes, except `classes_`. The output layer has one output per target.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Train on X (S, F), (S, H, W) or (S, H, W, C), and targets y (S,) or (S, T)."""
        X, y = validate_data(
            self, X, y, allow_nd=True, dtype="numeric", multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        self._flat = y.ndim == 1
        targets = y.reshape(len(y), -1).astype(np.float32)
        self._fit(self._images(X), targets, targets.shape[1], "mean_squared_error", sample_weight)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return predictions, (N,) or (N, T) like the targets of `fit`."""
        found = self._scores(X).astype(np.float64)  # required by scikit-learn for several targets
        return found[:, 0] if self._flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
