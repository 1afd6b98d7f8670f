"""The train command on user files: IDX, npz and image folders give the same weights, and mistakes one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cupynet.core.files import load_weights
from cupynet.runs.checkpoints import Checkpoints, read
from tests.support.commands import SMALL, run
from tests.support.data_errors import data_error
from tests.support.resumed_runs import resumed, trained
from tests.support.user_files import Parts, digits, write_idx, write_npz, write_pictures

LENET = ["model.layers.conv1.kernel=3", "model.layers.conv2.kernel=2", "callbacks.progress.style=lines"]
SHORT = [*LENET, *SMALL, "workers=2", "epochs=1", "batch_size=32"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Some digits stored in three ways, and the arguments that load each."""
    root, parts = tmp_path_factory.mktemp("kept"), digits(320, 80)
    return {
        "idx": ["data=idx", f"data.folder={write_idx(root / 'idx' / 'digits', parts)}"],
        "npz": ["data=npz", f"data.file={write_npz(root / 'digits.npz', parts)}"],
        "folder": ["data=folder", f"data.folder={write_pictures(root / 'folder' / 'digits', parts)}"],
    }


def test_all_formats_give_the_same_weights(kept: dict[str, list[str]], tmp_path: Path) -> None:
    augment = "data.augment=[{_target_: cupynet.data.Shift, pixels: 1}]"
    found = {}
    for way, asked in kept.items():
        folder = tmp_path / way
        trained(folder, *asked, *SHORT, "data.validation=20", "data.normalize=auto", augment)
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["dataset"], summary["images"]) == ("digits", 300)
        assert summary["class_names"] == ([f"class-{d}" for d in range(10)] if way == "folder" else None)
        found[way] = (
            load_weights(folder / "weights.safetensors"),
            summary["normalize"],
            summary["test_loss"],
        )
    weights, normalize, loss = found.pop("idx")
    assert 0.2 < normalize["mean"][0] < 0.5 and weights["output.weight"].shape == (16, 10)
    for other, same, as_much in found.values():
        assert (same, as_much) == (normalize, loss)
        for name, weight in weights.items():
            np.testing.assert_array_equal(other[name], weight)


def test_real_digits_are_learned_and_evaluated_again(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "digits.npz", digits())
    network = [*LENET, "model.layers.conv1.activation=relu", "model.layers.conv2.activation=relu"]
    small = ["workers=1", "epochs=20", "batch_size=32", "optimizer.learning_rate.peak=0.05"]
    folder = tmp_path / "run"
    trained(folder, "data=npz", f"data.file={path}", *network, *small, "data.normalize=auto")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.93  # of writers who are not in the training set
    stdout, _ = run(tmp_path, str(folder), command="evaluate")
    assert "the same as in summary.json" in stdout
    # other images would give another mean: the run's own is used
    stdout, _ = run(tmp_path, str(folder), "data.validation=400", command="evaluate")
    assert f"test accuracy {summary['test_accuracy']:.4f}, loss {summary['test_loss']!r}" in stdout
    stdout, _ = run(tmp_path, str(folder), "data.normalize=null", command="evaluate")
    assert f"loss {summary['test_loss']!r}" not in stdout


def test_evaluation_refuses_classes_of_other_names(tmp_path: Path) -> None:
    """In the order of their names each would be counted as the next."""
    few = Parts(*(array[:: len(array) // 40] for array in digits()))  # sorted by class
    for name, renamed in (("then", ""), ("now", "another")):
        folder = write_pictures(tmp_path / name, few)
        for part in ("train", "test"):
            if renamed:
                sorted((folder / part).iterdir())[-1].rename(folder / part / renamed)
    trained(tmp_path / "run", "data=folder", f"data.folder={tmp_path / 'then'}", *SHORT)
    _, stderr = run(tmp_path, "run", "data.folder=now", command="evaluate", code=65)
    assert "'another'" in stderr and stderr.count("\n") == 1


def test_a_run_with_augmentation_resumes_bit_for_bit(kept: dict[str, list[str]], tmp_path: Path) -> None:
    augment = "data.augment=[{_target_: cupynet.data.Elastic}, {_target_: cupynet.data.CutOut, size: 3}]"
    arguments = [*kept["idx"], *LENET, *SMALL, "workers=2", "batch_size=32", augment, "optimizer=sgd"]
    trained(tmp_path / "whole", *arguments, "epochs=2")
    trained(tmp_path / "broken", *arguments, "epochs=1")
    resumed(tmp_path / "broken", "epochs=2")
    whole = load_weights(tmp_path / "whole" / "weights.safetensors")
    found = load_weights(tmp_path / "broken" / "weights.safetensors")
    for name, weight in whole.items():
        np.testing.assert_array_equal(found[name], weight)


def of_version_0_1_0(run: Path) -> None:
    """Remove what identifies the data from the checkpoints of a run."""
    store = Checkpoints(run / "checkpoints")
    for step in store.steps():
        found = read(store.path(step))
        store.save(step, {name: each for name, each in found.state.items() if name != "data"}, found.arrays)


def test_a_resumed_run_continues_on_the_same_data(tmp_path: Path) -> None:
    parts = digits(320, 80)
    path = write_npz(tmp_path / "digits.npz", parts)
    for name, limit in (("all", "null"), ("some", "100")):
        trained(tmp_path / name, "data=npz", f"data.file={path}", *SHORT, f"data.limit={limit}")
        resumed(tmp_path / name, "epochs=2")
        of_version_0_1_0(tmp_path / name)
    resumed(tmp_path / "all", "epochs=3")
    before = (tmp_path / "some" / "weights.safetensors").read_bytes()
    with data_error("limit=100"):  # which were the first 100, of four classes
        resumed(tmp_path / "some", "epochs=3")
    write_npz(path, Parts(parts[0], parts[1][::-1], *parts[2:]))
    with data_error("labels"):
        resumed(tmp_path / "all", "epochs=4")
    assert (tmp_path / "some" / "weights.safetensors").read_bytes() == before


def test_a_run_on_transparent_pictures_that_were_black_is_not_resumed(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", digits(60, 30))
    for path in folder.rglob("*.png"):
        with Image.open(path) as opened:
            ink = opened.copy()
        Image.merge("LA", (Image.new("L", ink.size), ink)).save(path)
    trained(tmp_path / "run", "data=folder", f"data.folder={folder}", *SHORT)
    resumed(tmp_path / "run", "epochs=2")
    of_version_0_1_0(tmp_path / "run")
    with data_error("transparent"):
        resumed(tmp_path / "run", "epochs=3")


def test_colour_images_of_another_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60, dtype=np.uint8) % 3
    images = rng.integers(0, 120, (60, 14, 18, 3), np.uint8)
    images[np.arange(60), :, :, labels] += 100
    path = write_npz(tmp_path / "colours.npz", Parts(images, labels, images[:12], labels[:12]))
    parts = ["Shift", "HorizontalFlip", "CutOut", "Rotate", "Elastic"]
    augment = ",".join(f"{{_target_: cupynet.data.{part}}}" for part in parts)
    size = ["model.layers.output.units=3", "data.normalize={mean: [0.5,0.5,0.5], deviation: [0.25,0.25,0.5]}"]
    trained(tmp_path / "run", "data=npz", f"data.file={path}", *SHORT, *size, f"data.augment=[{augment}]")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["normalize"]["deviation"] == [0.25, 0.25, 0.5]
