"""Gradient accumulation: the gradients of a batch's parts add up to the gradient of the whole batch."""

from typing import Any

import numpy as np
import pytest

from cupynet import Dataset, GradientSharing, Loader, Nesterov, ParallelWrapper, ParameterAveraging
from cupynet.backend import Backend, Workspace
from cupynet.backend.array import Array
from cupynet.nn import BatchNorm, Dense, Loss, MeanSquaredError, Model, SoftmaxNLL
from tests.support.calls import watch
from tests.support.trainers import fitted, on_loan
from tests.support.training import small_dataset, small_model


def trained(
    steps: int,
    *,
    workers: int = 1,
    backend: str = "numpy",
    dtype: str = "double",
    loss: Loss | None = None,
    **options: Any,
) -> tuple[Any, list[float]]:
    model = small_model(dtype, backend)
    model.loss = loss or model.loss
    options |= {"accumulation_steps": steps, "optimizer": Nesterov(0.05, max_grad_norm=0.5)}
    with ParallelWrapper(model, workers, log_every=2, **options) as wrapper:
        history = wrapper.fit(Loader(small_dataset(45), 7, seed=3), epochs=2)  # the last batch has three samples
        assert wrapper.trainer.replica.updates == -(-7 // workers) * 2
        assert on_loan(wrapper) == [0] * workers
    return model.backend.to_host(model.params.master), history.reports["loss"]


@pytest.mark.parametrize(
    ("accumulation_steps", "options"),
    [
        (3, {"loss": MeanSquaredError()}),
        (7, {"loss": SoftmaxNLL(0.1, [1.0, 2.0, 0.5])}),
        (3, {"workers": 2, "synchronizer": ParameterAveraging(2)}),
        (3, {"workers": 2, "synchronizer": GradientSharing(), "backend": "numba"}),
    ],
    ids=["squared", "single examples", "averaging", "sharing"],
)
def test_accumulation_steps_train_like_whole_batches(accumulation_steps: int, options: dict[str, Any]) -> None:
    found, expected = (trained(n, **options) for n in (accumulation_steps, 1))
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10)


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_batch_norm_normalizes_each_accumulated_part(accumulation_steps: int) -> None:
    """Each part updates the running mean, which therefore differs from the whole batch's."""
    images = np.random.default_rng(0).integers(0, 256, (8, 2, 2, 1), np.uint8)
    model = Model({"norm": BatchNorm(momentum=0.75), "output": Dense(2)}, (2, 2, 1), "numpy", dtype="double")
    data = Loader(Dataset("noise", images, np.zeros(8, np.int64), 2), 8, shuffle=False)
    fitted(model, data, accumulation_steps=accumulation_steps)
    expected = 0.0
    for part in np.split(images / 255, accumulation_steps):
        expected = 0.75 * expected + 0.25 * part.mean()
    assert model.weights()["norm.mean"] == pytest.approx(expected)


def test_accumulation_steps_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    watch(monkeypatch, Workspace, "borrow", lambda array, *_: sizes.append(array.size))

    def largest_loan(accumulation_steps: int) -> int:
        sizes.clear()
        fitted(small_model(), Loader(small_dataset(48), 16, seed=3), accumulation_steps=accumulation_steps)
        return max(sizes)

    assert largest_loan(4) * 4 == largest_loan(1)


class StoredLosses(SoftmaxNLL):
    """A user-defined loss that returns losses in the outputs' precision."""

    def __call__(self, backend: Backend, outputs: Array, targets: Array) -> tuple[Array, Array]:
        losses, gradient = super().__call__(backend, outputs, targets)
        return losses.astype(outputs.dtype), gradient


@pytest.mark.standin
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_loss_may_return_losses_in_storage_precision_on_a_gpu(accumulation_steps: int) -> None:
    options: dict[str, Any] = {"backend": "cupy", "dtype": "half"}
    found = [trained(accumulation_steps, loss=loss, **options)[1] for loss in (SoftmaxNLL(), StoredLosses())]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)
