"""Estimators for scikit-learn: pipelines, cross validation, grid search. Needs `pip install 'cupynet[sklearn]'`.

from cupynet.sklearn import Classifier
from sklearn.model_selection import GridSearchCV

classifier = Classifier([Conv2D(20, 5), MaxPool2D(2), Dense(100, activation="relu")], input=(28, 28, 1))
search = GridSearchCV(classifier, {"workers": [1, 2], "averaging_frequency": [1, 10]}).fit(x, y)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from cupynet.core.errors import ConfigError
from cupynet.data import Dataset, Loader
from cupynet.nn import Dense, Layer, Model, Sequential
from cupynet.optim import Adam, Optimizer
from cupynet.training import Callback, ParallelWrapper

Layers = Sequence[Layer] | Mapping[str, Layer]


class Classifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network for classification, trained by replicas in parallel.

    Images of integers are pixels from 0 to 255. Everything else is taken as scaled already, as by `StandardScaler`.

    Args:
        layers: hidden layers; a `Dense` layer with an output for each class is added. By default Dense(100, "relu").
        input: the shape of one example, such as (28, 28, 1), if `fit` gets flat vectors; by default that of the data.
        epochs, batch_size, validation_split: see `ParallelWrapper.fit`.
        workers, averaging_frequency, callbacks: see `ParallelWrapper`.
        optimizer: Adam(0.003) by default.
        loss, backend, dtype: see `Model`.
        random_state: seed of the weights and of the order of samples.

    Attributes:
        classes_: the labels, (O,), in the order of the outputs.
        n_features_in_: values per example.
        model_: the trained `Model`.
        history_: the history of the fit.
        n_iter_: epochs trained.
    """

    def __init__(
        self,
        layers: Layers | None = None,
        input: tuple[int, ...] | None = None,
        *,
        epochs: int = 20,
        batch_size: int = 32,
        workers: int | None = 1,
        averaging_frequency: int | str = 3,
        optimizer: Optimizer | None = None,
        loss: str = "softmax",
        validation_split: float = 0.0,
        callbacks: Sequence[Callback] = (),
        backend: str = "auto",
        dtype: str = "float",
        random_state: int = 0,
        progress: str = "none",
    ) -> None:
        self.layers = layers
        self.input = input
        self.epochs = epochs
        self.batch_size = batch_size
        self.workers = workers
        self.averaging_frequency = averaging_frequency
        self.optimizer = optimizer
        self.loss = loss
        self.validation_split = validation_split
        self.callbacks = callbacks
        self.backend = backend
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: Any, y: Any) -> Classifier:
        """Train on X, (S, F), (S, H, W) or (S, H, W, C), and labels y (S,) of any type. ConfigError, ValueError."""
        X, y = validate_data(self, X, y, allow_nd=True, dtype="numeric", ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        images = self._images(X)
        layers = [Dense(100, activation="relu")] if self.layers is None else self.layers
        hidden = layers if isinstance(layers, Mapping) else Sequential(list(layers)).layers
        network = {**hidden, "output": Dense(max(len(self.classes_), 2))}
        seed = int(self.random_state)
        self.model_ = Model(network, images.shape[1:], self.backend, seed, self.loss, dtype=self.dtype)
        data = Dataset("X", images, numbers, self.model_.output.features)
        with ParallelWrapper(
            self.model_,
            self.workers,
            self.averaging_frequency,
            optimizer=Adam(0.003) if self.optimizer is None else self.optimizer,
            callbacks=self.callbacks,
            progress=self.progress,
            log_every=0,
        ) as wrapper:
            loader = Loader(data, self.batch_size, seed)
            self.history_ = wrapper.fit(loader, epochs=self.epochs, validation_split=self.validation_split)
        self.n_iter_ = len(self.history_.epochs["epoch"])
        return self

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the scores of each class, (N, O), as in `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, allow_nd=True, dtype="numeric")
        scores: NDArray[Any] = self.model_.predict(self._images(X))[:, : len(self.classes_)]
        return scores / scores.sum(axis=1, keepdims=True) if len(self.classes_) == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the label with the highest score of each example, (N,)."""
        scores = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[scores.argmax(axis=1)]
        return found

    def _images(self, X: NDArray[Any]) -> NDArray[Any]:
        """Return the examples as images (S, H, W, C), pixels of uint8 or float32. ConfigError."""
        if self.input is not None:
            if int(np.prod(self.input)) != int(np.prod(X.shape[1:])):
                raise ConfigError(f"does not have the {X.shape[1:]} values of an example", "input", str(self.input))
            X = X.reshape(len(X), *self.input)
        if X.ndim == 2:
            X = X[:, None, :, None]  # features are the pixels of a row
        elif X.ndim == 3:
            X = X[..., None]
        return X if X.dtype == np.uint8 else X.astype(np.float32)
