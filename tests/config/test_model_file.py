"""`Model.save` and `cupynet.load`: a single file has everything, and no file can do harm."""

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynet
from cupynet import Conv2D, Dense, Model, ParallelWrapper, Residual
from cupynet.backend import PixelScale
from cupynet.core.errors import ConfigError, CupynetError, DataError
from cupynet.core.files import load_described, save_described
from cupynet.nn import Normal, Params
from tests.guides.extending.scale import Scale
from tests.support.refusals import refused
from tests.support.training import small_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
PREDICT = """
import sys, numpy as np, cupynet
images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
sys.stdout.buffer.write(cupynet.load(sys.argv[1], "numpy").predict(images).tobytes())
"""


@pytest.fixture
def model() -> Model:
    layers = {
        "conv": Conv2D(4, 3, init=Normal(0.1), padding="same"),
        "norm": cupynet.BatchNorm(),
        "block": Residual([Conv2D(4, 3, padding="same", activation="relu")]),
        "pool": cupynet.MaxPool2D((2, 2)),
        "drop": cupynet.Dropout(0.2),
        "mixed": cupynet.Concat({"a": [Conv2D(2, 1)], "b": cupynet.AvgPool2D(1)}),
        "out": Dense(3),
    }
    made = Model(layers, (8, 8), "numpy", seed=5, loss=cupynet.SoftmaxNLL(0.1))
    made.pixels, made.class_names = PixelScale.of([0.1], [0.3]), ("ä", "b", "c")
    return made


@pytest.fixture
def file(model: Model, tmp_path: Path) -> Path:
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_saved_model_predicts_bit_identically_in_a_new_process(model: Model, file: Path) -> None:
    found = subprocess.run([sys.executable, "-c", PREDICT, str(file)], capture_output=True, check=True).stdout
    assert found == model.predict(IMAGES).tobytes()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copied_and_pickled_models_are_equal_and_independent(model: Model, again: Callable[[Model], Model]) -> None:
    made = again(model)
    np.testing.assert_array_equal(made.predict(IMAGES), model.predict(IMAGES))
    assert (made.class_names, made.pixels, made.seed) == (model.class_names, model.pixels, model.seed)
    made.params.master[...] = 0
    assert model.params.master.any()


def test_a_changed_argument_of_a_layer_is_refused_by_save_copy_and_fit(model: Model, file: Path) -> None:
    """Copies, replicas and files are made from the original layers."""
    norm: Any = dict(model.network.children())["norm"]
    data, wrapper = small_dataset(8), ParallelWrapper(model, 2)
    wrapper.fit(data)
    for norm.epsilon in (0.1, np.float32(0.1)):
        for again in (lambda: model.save(file), lambda: copy.copy(model), lambda: wrapper.fit(data)):
            with refused("norm.epsilon"):
                again()
    norm.epsilon = 1e-5
    wrapper.fit(data)
    model.save(file)


def test_a_loaded_model_can_be_trained_and_saved_again(file: Path, tmp_path: Path) -> None:
    loaded = cupynet.load(file, backend="numpy", dtype="double")
    assert (loaded.backend.name, loaded.backend.policy.name, loaded.loss.label_smoothing) == ("numpy", "double", 0.1)  # type: ignore[attr-defined]
    with ParallelWrapper(loaded, 2) as wrapper:
        wrapper.fit(small_dataset(20), batch_size=4)
    loaded.save(tmp_path / "again.safetensors")
    np.testing.assert_array_equal(
        cupynet.load(tmp_path / "again.safetensors").weights()["out.bias"], loaded.weights()["out.bias"]
    )


def test_layers_of_the_user_are_loaded_only_if_their_module_is_trusted(tmp_path: Path) -> None:
    model = Model([Scale(), Dense(3)], (8, 8), "numpy")
    model.save(tmp_path / "own.safetensors")
    with pytest.raises(ConfigError):
        cupynet.load(tmp_path / "own.safetensors")
    module = "tests.guides.extending.scale"
    with refused("trusted_modules"):
        cupynet.load(tmp_path / "own.safetensors", trusted_modules=module)
    trusted = cupynet.load(tmp_path / "own.safetensors", "numpy", trusted_modules=[module])
    np.testing.assert_array_equal(trusted.predict(IMAGES), model.predict(IMAGES))


def test_a_model_that_a_file_cannot_describe_is_refused_by_save_and_by_fit_with_a_run(tmp_path: Path) -> None:
    class Local(Dense):
        pass

    changed_later = cupynet.Dropout(0.5)
    changed_later.rate = 0.1
    for layer in (Dense(3, init=lambda rng, shape: np.zeros(shape)), Local(3), changed_later):
        model = Model([layer, Dense(3)], (8, 8), "numpy")
        with pytest.raises(ConfigError):
            model.save(tmp_path / "model.safetensors")
        with ParallelWrapper(model, 1, run=tmp_path / type(layer).__name__) as wrapper, pytest.raises(ConfigError):
            wrapper.fit(small_dataset(8))
        assert not wrapper.history.epochs
    assert not [*tmp_path.rglob("*.safetensors")]


def test_a_model_with_weights_that_are_not_finite_is_not_saved(model: Model, file: Path) -> None:
    before = file.read_bytes()
    model.params.master[0] = np.nan
    with refused(""):
        model.save(file)
    assert file.read_bytes() == before


def test_a_model_with_a_flat_input_is_saved_and_loaded(tmp_path: Path) -> None:
    model = Model([Dense(3)], cupynet.Flat(5), "numpy")
    model.save(tmp_path / "model.safetensors")
    loaded = cupynet.load(tmp_path / "model.safetensors", "numpy")
    assert loaded.input == model.input
    np.testing.assert_array_equal(loaded.weights()["dense1.weight"], model.weights()["dense1.weight"])


def test_save_refuses_a_file_of_another_format(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.keras", "model"):
        with refused("path", name):
            model.save(name)
    for wrong in (None, io.BytesIO()):
        with refused("path"):
            model.save(wrong)  # type: ignore[arg-type]
    model.save(Path("MODEL.SAFETENSORS"))
    assert [*map(str, Path().iterdir())] == ["MODEL.SAFETENSORS"]


class Renamed(Dense):
    """Takes any keyword arguments, like classes of Keras users."""

    def __init__(self, units: int, **others: Any) -> None:
        super().__init__(units, **others)


def test_a_model_is_saved_with_the_layers_that_it_was_made_of(tmp_path: Path) -> None:
    layers = [Renamed(4, activation="relu"), Dense(3)]
    model = Model(layers, (8, 8), "numpy", loss=cupynet.SoftmaxNLL(class_weights=np.ones(3)))
    layers.insert(0, Dense(9))
    model.save(tmp_path / "model.safetensors")
    loaded = cupynet.load(tmp_path / "model.safetensors", "numpy", trusted_modules=[__name__])
    np.testing.assert_array_equal(loaded.predict(IMAGES), model.predict(IMAGES))


ACTING = ["os.system", "builtins.eval", "subprocess.Popen", "cupynet.core.lock.Hold", "cupynet.train.main", "a", "", 5]
NETWORK = "network.layers.out"
HOSTILE: dict[str, tuple[str, Any]] = {  # a key of the description, and its value; `...` removes it
    **{f"class {name!r}": (f"{NETWORK}._target_", name) for name in ACTING},
    **{f"loss {name!r}": ("loss._target_", name) for name in ACTING},
    **{f"without {key}": (key, ...) for key in ("network", "loss", "input", "dtype", "seed", "class_names")},
    **{f"{key} is a list": (key, [[]]) for key in ("network", "loss", "input", "dtype", "seed")},
    "no layers": ("network.layers", {}),
    "more units": (f"{NETWORK}.units", 4),
    "very many units": (f"{NETWORK}.units", 10**12),
    "an own pixel scale": ("normalize", {"mean": [0.0, 0.0], "std": [1.0]}),
    "no std": ("normalize", {"mean": [0.0], "std": [0.0]}),
    "too few names": ("class_names", ["a"]),
    "trained on something else": ("trained_on", "yes"),
    "a huge input": ("input", [10**9, 10**9, 1]),
    "a model as a layer": (
        NETWORK, {"_target_": "cupynet.nn.Model", "network": [], "input": [9**9, 9**9], "backend": "numpy"}
    ),
    "an initializer of another kind": (f"{NETWORK}.init", {"_target_": "cupynet.data.augment.Shift"}),
    "the base class of layers": ("network", {"_target_": "cupynet.nn.Layer"}),
    "the base class of losses": ("loss", {"_target_": "cupynet.nn.Loss"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_file_with_a_hostile_description_is_refused(name: str, file: Path) -> None:
    (*above, last), value = HOSTILE[name][0].split("."), HOSTILE[name][1]
    weights, description = load_described(file)
    part = reduce(getitem, above, description)
    part[last] = value
    if value is ...:
        del part[last]
    save_described(file, weights, description)
    with pytest.raises(CupynetError) as caught:
        cupynet.load(file)
    assert caught.value.exit_code in (2, 65)


def test_a_model_file_with_former_names_of_arguments_is_loaded(model: Model, file: Path) -> None:
    weights, description = load_described(file)
    former = json.loads(json.dumps(description).replace('"kernel_size"', '"kernel"'))
    save_described(file, weights, former)
    assert former != description and np.array_equal(cupynet.load(file, "numpy").predict(IMAGES), model.predict(IMAGES))


def test_load_allocates_memory_only_for_the_weights_in_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, description = load_described(file)
    description["network"]["layers"]["out"]["units"] = 4
    save_described(file, weights, description)
    allocated: list[object] = []
    monkeypatch.setattr(Params, "allocate", lambda self, *_: allocated.append(self))
    with pytest.raises(DataError):
        cupynet.load(file)
    assert not allocated


def test_a_damaged_model_file_is_refused(model: Model, file: Path) -> None:
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    places = [*rng.integers(0, len(whole), 15).tolist(), 0, 7, 8, 20]
    flipped = [whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :] for place in places]
    cupynet.save_weights(file, model.weights())
    without_a_description = file.read_bytes()
    for damaged in (*flipped, whole[:-5], b"{}", without_a_description):
        file.write_bytes(damaged)
        with pytest.raises(DataError):
            cupynet.load(file)
