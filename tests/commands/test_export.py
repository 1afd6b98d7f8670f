"""`cupynet export` as a user types it. tests/interop tests the files that it writes."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from cupynet import Run, interop, load, load_weights
from cupynet.commands.export import main
from tests.support.commands import Call, summary_of
from tests.support.resumed_runs import trained

SMALL = ["data=synthetic", "data.train=200", "data.test=100", "batch_size=32", "epochs=1", "workers=1", "model=mlp"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in double precision with normalized pixels."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    trained(folder, *SMALL, "data.normalize=auto", "dtype=double")
    return folder


def metadata_of(path: Path) -> dict[str, str]:
    return {each.key: each.value for each in onnx.load(path).metadata_props}


def test_an_onnx_file_has_labels_accuracy_commit_and_preprocessing(finished: Path, tmp_path: Path, call: Call) -> None:
    call(main, finished, "--onnx", tmp_path / "a.onnx")
    metadata, summary = metadata_of(tmp_path / "a.onnx"), Run(finished).summary()
    assert json.loads(metadata["labels"]) == [str(number) for number in range(10)]
    assert metadata["dataset"] == "synthetic" and float(metadata["test_accuracy"]) == summary.scores.test_accuracy
    assert metadata["commit"] == str(summary.setup.commit)
    assert json.dumps(summary.setup.normalize) in metadata["preprocessing"]


def test_an_onnx_file_has_class_names_and_accuracy_if_there_are_any(finished: Path, tmp_path: Path, call: Call) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    names = [f"kind {number}" for number in range(10)]
    summary_of(folder, class_names=names, test_accuracy=None)
    call(main, folder, "--onnx", tmp_path / "a.onnx")
    metadata = metadata_of(tmp_path / "a.onnx")
    assert json.loads(metadata["labels"]) == names and "test_accuracy" not in metadata


def test_weights_and_modules_are_exported_in_single_precision(finished: Path, tmp_path: Path, call: Call) -> None:
    files = {"safetensors": "a.safetensors", "torch": "torch.safetensors", "torch-module": "a.py"}
    given = [word for form, name in files.items() for word in (f"--{form}", tmp_path / name)]
    found = call(main, finished, *given)
    assert found.code == 0 and [line.split(":")[0] for line in found.out.splitlines()] == [*map(str, given[1::2])]
    model = load(finished, dtype="float")
    for name, weight in load_weights(tmp_path / "a.safetensors").items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, model.weights()[name])
    assert load_file(tmp_path / "torch.safetensors")["dense1.weight"].shape == (256, 784)
    assert "nn.Linear(784, 256, bias=True)" in (tmp_path / "a.py").read_text()


def test_an_onnx_file_has_pixels_of_the_type_of_the_option_input(finished: Path, tmp_path: Path, call: Call) -> None:
    for options, kind in (((), onnx.TensorProto.UINT8), (("--input", "float"), onnx.TensorProto.FLOAT)):
        assert call(main, finished, "--onnx", tmp_path / "a.onnx", *options).code == 0
        (images,) = onnx.load(tmp_path / "a.onnx").graph.input
        assert images.type.tensor_type.elem_type == kind


def test_a_checkpoint_is_exported_without_the_results_of_the_run(finished: Path, tmp_path: Path, call: Call) -> None:
    step, file = finished / "checkpoints" / "step-00000007", tmp_path / "a.onnx"
    assert call(main, step, "--onnx", file).code == 0 and "test_accuracy" not in metadata_of(file)


def test_an_onnx_file_whose_predictions_differ_is_not_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(interop, "difference", lambda *_: 2e-4)
    found = call(main, finished, "--onnx", tmp_path / "a.onnx")
    assert found.code == 1 and "2.0e-04" in found.error and not list(tmp_path.iterdir())
    monkeypatch.setattr(interop, "difference", lambda *_: None)  # as without onnxruntime
    assert call(main, finished, "--onnx", tmp_path / "a.onnx").code == 0 and (tmp_path / "a.onnx").exists()


OF_THE_RUN = ("weights.safetensors", "summary.json", ".hydra/config.yaml", "checkpoints/step-00000007/state.json")


def test_an_export_does_not_overwrite_a_file_of_the_run(finished: Path, tmp_path: Path, call: Call) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    for name in OF_THE_RUN:
        before = (folder / name).read_bytes()
        found = call(main, folder, "--torch", folder / name)
        assert found.code == 2 and str(folder / name) in found.error and (folder / name).read_bytes() == before
    for _ in range(2):  # the file of an earlier export is replaced
        assert call(main, folder, "--torch", folder / "torch.safetensors").code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "cupynet_run.json"])
def test_an_export_does_not_overwrite_a_file_of_a_run_in_python(
    name: str, finished: Path, tmp_path: Path, call: Call
) -> None:
    for own in ("model.safetensors", "cupynet_run.json"):
        (tmp_path / own).write_text("theirs")
    found = call(main, finished, "--safetensors", tmp_path / name)
    assert found.code == 2 and str(tmp_path / name) in found.error and (tmp_path / name).read_text() == "theirs"


def test_a_run_with_layers_of_the_user_is_exported_only_with_trusted_modules(tmp_path: Path, call: Call) -> None:
    own = "model.layers.drop1._target_=tests.guides.extending.scale.Scale"
    trained(tmp_path / "run", *SMALL, own, "trusted_modules=[tests]")
    typed = (main, tmp_path / "run", "--safetensors", tmp_path / "a.safetensors")
    found = call(*typed)
    assert found.code == 2 and "trusted_modules" in found.error and not (tmp_path / "a.safetensors").exists()
    assert call(*typed, "--trusted-modules", "tests").code == 0
    assert "drop1.factor" in load_weights(tmp_path / "a.safetensors")
