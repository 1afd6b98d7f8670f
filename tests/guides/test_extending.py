"""The examples of cupynet/guides/extending.md: a class in the user's own file, named by `_target_`.

Each example in tests/guides/extending trains with command-line settings and behaves as described.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cupynet import Conv2D, Dense, Image, Sequential, create_backend
from tests.guides.extending.lion import Lion
from tests.guides.extending.residual import Residual
from tests.guides.extending.scale import Scale
from tests.support.backends import every_backend
from tests.support.commands import SMALL, summary_of
from tests.support.gradients import check_layer
from tests.support.resumed_runs import trained
from tests.support.training import small_model

EXAMPLES = Path(__file__).parent / "extending"
QUICK = ("epochs=1", "workers=3", "batch_size=16")
DIGITS = ("data=synthetic", "data.train=200", "data.test=50")
WITHOUT_POOL2 = 2_432 - 96 * 16 + 8 * 8 * 6 * 16  # parameters of LeNet in `SMALL`
# an example's settings, and an entry of its summary.json
COMMANDS: dict[str, tuple[str, str, object]] = {
    "absolute_error": ("loss._target_=absolute_error.AbsoluteError", "epochs", 1),
    "gradient_mean": (
        "parallel.synchronizer._target_=gradient_mean.GradientMean",
        *("synchronizer", "synchronized by GradientMean"),
    ),
    # a rule without a kernel runs as array operations
    "lion": ("optimizer._target_=lion.Lion optimizer.learning_rate=0.001 ++optimizer.beta2=0.98", "backend", "numba"),
    "print_score": ("+callbacks.score._target_=print_score.PrintScore log_every=1", "epochs", 1),
    "residual": (
        "model.layers.pool2._target_=residual.Residual model.layers.pool2.kernel_size=5",
        *("parameters", WITHOUT_POOL2 + 5 * 5 * 6 * 6 + 6),
    ),
    "saw": ("optimizer.learning_rate._target_=saw.Saw +optimizer.learning_rate.every=5", "epochs", 1),
    "scale": ("model.layers.pool2._target_=scale.Scale", "parameters", WITHOUT_POOL2 + 8 * 8 * 6),
    "stop_at": ("+callbacks.stop._target_=stop_at.StopAt +callbacks.stop.loss=100 log_every=1", "iterations", 1),
    "stripes": (
        "data._target_=stripes.Stripes +data.images=300 backend=numpy "
        "model.layers.output.units=3 model.layers.conv2.kernel_size=3",
        *("dataset", "stripes"),
    ),
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the examples importable by their file names, as in a user's folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in COMMANDS:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_the_guide_trains_with_its_settings(name: str, tmp_path: Path) -> None:
    settings, key, value = COMMANDS[name]
    data = () if name == "stripes" else DIGITS
    trained(tmp_path, *data, *QUICK, *SMALL, *settings.split(), f"trusted_modules=[{name}]")
    assert summary_of(tmp_path)[key] == value


@every_backend
def test_the_example_of_an_optimizer_follows_its_formula(name: str) -> None:
    model = small_model("float", name)
    optimizer = Lion(0.01, weight_decay=0.1)
    optimizer.init(model.params, model.backend)
    weights, mean = (model.backend.to_host(model.params.master).copy(), 0.0)
    decayed = np.zeros(weights.size)
    for segment in model.params.segments:
        decayed[segment.part] = 0.1 * segment.decay
    rng = np.random.default_rng(1)
    for iteration in range(3):
        gradient = rng.normal(size=weights.size)
        model.params.grad[...] = model.backend.asarray(gradient, model.params.grad.dtype)
        optimizer.step(model.params, iteration)
        weights = weights - 0.01 * (np.sign(0.9 * mean + 0.1 * gradient) + decayed * weights)
        mean = 0.99 * mean + 0.01 * gradient
        found = model.backend.to_host(model.params.master)
        np.testing.assert_allclose(found, weights, rtol=1e-6, atol=1e-6)


def test_the_derivatives_of_the_examples_of_layers_equal_finite_differences() -> None:
    network = Sequential([Scale(), Conv2D(3, 3, activation="relu"), Residual(1), Residual(3), Scale(), Dense(4)])
    check_layer(network, Image(7, 6, 2), create_backend("numpy", "double"))


GUIDE = (Path(__file__).parents[2] / "cupynet" / "guides" / "extending.md").read_text("utf-8")
SHOWN = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("name", ["absolute_error", "gradient_mean", "print_score", "saw", "scale"])
def test_the_guide_shows_the_tested_code(name: str) -> None:
    shown = next(code for code in SHOWN if code.startswith(f"# {name}.py"))
    tested = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert shown.split("\n", 1)[1].strip() == tested.split('"""\n', 1)[1].strip()  # without title and docstring
