"""Accuracy of four workers on a GPU, in float and in 16 bits. Only on real GPUs: the stand-in would take hours."""

from __future__ import annotations

import pytest

from cupynet.config.experiment import Experiment
from cupynet.core.errors import DataError
from tests.support.backends import REAL_GPU, needs_bfloat16
from tests.support.settings import settings_of

# those of modes.json, in which four workers reach 99.31 % on a processor, and not less than 99.26 % (five seeds)
LENET = ("workers=4", "batch_size=32", "epochs=5")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not REAL_GPU, reason="takes a GPU, not one that is made up")]
every_dtype_of_training = pytest.mark.parametrize(
    "dtype", ["float", "half", pytest.param("bfloat16", marks=needs_bfloat16)]
)
pytestmark = on_a_gpu


def accuracy(*overrides: str) -> float:
    """Train LeNet and return its accuracy on the test images."""
    experiment = Experiment(settings_of(*LENET, *overrides))
    data = experiment.load()
    with experiment.wrapper(callbacks=()) as wrapper:
        fitted = wrapper.fit(experiment.train_loader(data), experiment.settings.epochs)
        return fitted.evaluate(experiment.evaluation_loader(data.test)).accuracy


@every_dtype_of_training
def test_lenet_reaches_99_percent_of_mnist(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs MNIST below $CUPYNET_DATA or in the user's cache."""
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    try:
        reached = accuracy("backend=cupy", f"dtype={dtype}", "data.fallback=null")
    except DataError as error:
        pytest.skip(str(error))
    assert reached >= 0.99


@every_dtype_of_training
def test_lenet_reaches_97_percent_of_the_synthetic_digits(dtype: str) -> None:
    assert accuracy("backend=cupy", f"dtype={dtype}", "data=synthetic") >= 0.97
