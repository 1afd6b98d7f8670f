"""Passes return their memory automatically and in order, without the garbage collector."""

import sys
import weakref
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import Backend, create_backend
from cupynet.optim import LAMB
from tests.support.backends import every_backend, every_dtype
from tests.support.networks import examples, train_step

INPUT = nn.Image(6, 6, 3)

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


def every_layer() -> nn.Layer:
    """Return a network with a layer of each kind, alone or fused with the next."""
    layers: list[nn.Layer] = [
        nn.Conv2D(6, 3, padding="same", activation="silu"),
        nn.Conv2D(6, 3, padding="same", groups=2),
        nn.Conv2D(6, 3, padding="same", groups=6),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.Conv2D(3, 3, padding="same", activation="relu"),
        nn.MaxPool2D(2, 1, 1),
        nn.Residual([nn.Conv2D(3, 1), nn.BatchNorm(), nn.Activation("gelu")]),
        nn.Residual([nn.Conv2D(3, 1), nn.BatchNorm()]),
        nn.Activation("relu"),
        nn.Residual([nn.Conv2D(6, 1)], shortcut=nn.Conv2D(6, 1)),
        nn.Concat([nn.Conv2D(3, 1), nn.AvgPool2D(3, 1, 1), nn.Dropout(0.2), nn.MaxPool2D(3, 1, 1)]),
        nn.LayerNorm("channels"),
        nn.Dropout(0.3),
        nn.Concat([nn.GlobalAvgPool2D(), nn.Flatten()]),
        nn.LayerNorm(),
        nn.Dense(5, activation="softmax"),
        nn.Dense(5, activation="tanh"),
        nn.Dense(3),
    ]
    return nn.Sequential(layers)


def trained(name: str, *layers: nn.Layer) -> None:
    model = nn.Model(nn.Sequential([nn.Dense(3), *layers]), INPUT, create_backend(name))
    train_step(model, *examples(model.backend, 2, INPUT))


@every_backend
@every_dtype
def test_steps_after_the_first_allocate_no_memory(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, optimizer = create_backend(name, dtype), LAMB(0.001, clip_layer_norm=1.0)
    allocate = Mock(wraps=backend.workspace._allocate)
    monkeypatch.setattr(backend.workspace, "_allocate", allocate)
    model = nn.Model(every_layer(), INPUT, backend)
    optimizer.init(model.params, backend)
    train_step(model, *examples(backend, 3, INPUT), optimizer, 0)
    first = allocate.call_count
    for iteration in range(1, 5 if name == "cupy" else 20):
        train_step(model, *examples(backend, 2 if iteration % 7 == 3 else 3, INPUT), optimizer, iteration)
        assert backend.workspace.on_loan == 0
    assert allocate.call_count == first > 0


class Watched(nn.Layer):
    """The identity. Its backward pass records which outputs of such layers are alive, and whether dy is freed."""

    outputs: list[Any]
    alive: list[list[bool]]
    gone: list[bool]

    def build(self, input: nn.InputType, params: Any, backend: Backend) -> nn.InputType:
        return input

    def forward(self, x: Any, context: nn.Context) -> tuple[Any, nn.Backward]:
        y = self.backend.borrow(x.shape)
        y[...] = x
        self.outputs.append(weakref.ref(y))

        def backward(dy: Any) -> Any:
            self.alive.append([output() is not None for output in self.outputs])
            dx = self.backend.borrow(y.shape)
            dx[...] = dy
            given = weakref.ref(dy)
            del dy
            self.gone.append(given() is None)
            return dx

        return y, backward


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    for name in ("outputs", "alive", "gone"):
        monkeypatch.setattr(Watched, name, [], raising=False)
    return Watched


@every_backend
def test_activations_are_freed_in_the_order_of_the_backward_pass(name: str, watched: type[Watched]) -> None:
    trained(name, Watched(), Watched(), Watched(), nn.Dense(3))
    assert watched.alive == [[True, True, True], [True, True, False], [True, False, False]]


@every_backend
def test_a_gradient_is_freed_as_soon_as_it_has_been_read(name: str, watched: type[Watched]) -> None:
    trained(name, Watched(), nn.Sequential([Watched(), nn.Residual(Watched()), Watched()]), nn.Dense(3))
    trained(name, nn.Residual([Watched(), nn.BatchNorm()], Watched()), nn.Activation("relu"), nn.Dense(3))
    assert len(watched.gone) == 6
    if sys.version_info >= (3, 11):  # before, the caller's frame held the arguments
        assert all(watched.gone)


@every_backend
def test_a_backward_pass_may_be_called_once_and_only_in_training(name: str) -> None:
    model = nn.Model(nn.Sequential([nn.Dense(3)]), INPUT, create_backend(name))
    x, _ = examples(model.backend, 2, INPUT)
    logits, backward = model.forward(x, nn.Context(train=True))
    backward(logits)
    for spent in (backward, model.forward(x, nn.INFERENCE)[1]):
        with pytest.raises(RuntimeError):
            spent(logits)


@every_backend
def test_scores_returned_to_the_user_are_not_overwritten_by_later_passes(name: str) -> None:
    model = nn.Model(every_layer(), INPUT, create_backend(name))
    x, labels = examples(model.backend, 3, INPUT)
    scores, logits = model.scores(x)
    kept = scores.copy(), logits.copy()
    train_step(model, x, labels)
    model.scores(x[:2] * 2)
    np.testing.assert_array_equal(scores, kept[0])
    np.testing.assert_array_equal(logits, kept[1])
